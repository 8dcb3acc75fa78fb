"""What a model writes by itself, as text to learn from: questions, and its answers to them."""

from eecore.answers.asking import (
    QuestionSettings,
    QuestionsReport,
    Round,
    follow_ups,
    own_rounds,
    read_own_questions,
    write_questions,
)
from eecore.answers.questions import builtin_questions, read_questions
from eecore.answers.writing import (
    Answer,
    AnswerSettings,
    AnswersReport,
    read_answers,
    write_answers,
)

__all__ = [
    "Answer",
    "AnswerSettings",
    "AnswersReport",
    "QuestionSettings",
    "QuestionsReport",
    "Round",
    "builtin_questions",
    "follow_ups",
    "own_rounds",
    "read_answers",
    "read_own_questions",
    "read_questions",
    "write_answers",
    "write_questions",
]
