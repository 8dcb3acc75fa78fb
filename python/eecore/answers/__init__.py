"""What a model writes by itself, as text to learn from: questions, and its answers to them."""

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
    "builtin_questions",
    "read_answers",
    "read_questions",
    "write_answers",
]
