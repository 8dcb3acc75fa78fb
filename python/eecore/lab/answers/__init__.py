"""What a model writes by itself, as text to learn from: questions, and its answers to them."""

from eecore.lab.answers.asking import (
    QuestionSettings,
    QuestionsReport,
    Round,
    follow_ups,
    own_rounds,
    read_own_questions,
    write_questions,
)
from eecore.lab.answers.passages import Passage, digest_of, questions_about, read_passages
from eecore.lab.answers.questions import builtin_questions, read_questions
from eecore.lab.answers.writing import (
    Answer,
    AnswerSettings,
    AnswersReport,
    chat_ids,
    read_answers,
    write_answers,
)

__all__ = [
    "Answer",
    "AnswerSettings",
    "AnswersReport",
    "Passage",
    "QuestionSettings",
    "QuestionsReport",
    "Round",
    "builtin_questions",
    "chat_ids",
    "digest_of",
    "follow_ups",
    "own_rounds",
    "questions_about",
    "read_answers",
    "read_own_questions",
    "read_passages",
    "read_questions",
    "write_answers",
    "write_questions",
]
