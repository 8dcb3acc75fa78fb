#!/usr/bin/env bash
# typer takes 5.0 for an option of type int, and refuses the digit three of Arabic.
#
# Guess: an int option is read by Python's int(), as click reads it, so that "5.0" is refused and "٣" is 3, and an
# option of type float with min=0 takes "nan", since no comparison with it is true.
# Seen with typer 0.29.2 and pydantic 2.14.4: values are validated by pydantic. "5.0" is 5, "٣" is refused, and so is
# "nan" with min=0; "1_000" is 1000 in both. The messages are pydantic's too ("Input should be a valid integer, unable
# to parse string as an integer") and leave the value out. typer 0.12.5 with click 8.1.7 does as guessed.
# A command line that supports a range of releases takes different values with each of them, and a test of its messages
# holds with one alone.
# Output seen: 5 1000 refused refused
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check typer==0.29.2 pydantic==2.14.4
got=$("$folder/venv/bin/python" - <<'PYTHON'
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def show(
    count: Annotated[int, typer.Option(min=1)] = 1,
    share: Annotated[float, typer.Option(min=0)] = 0.0,
) -> int:
    return count


command = typer.main.get_command(app)


def taken(*arguments: str) -> str:
    try:
        return str(command(args=list(arguments), standalone_mode=False))
    except typer.BadParameter:
        return "refused"


print(taken("--count", "5.0"), taken("--count", "1_000"), taken("--count", "٣"), taken("--share", "nan"))
PYTHON
)
echo "$got"
[ "$got" = '5 1000 refused refused' ]
