#!/usr/bin/env bash
# zod 4 gives each integer of a JSON schema bounds of its own.
#
# Guess: z.int() becomes {"type": "integer"}, as zod-to-json-schema made it for zod 3, and as pydantic does.
# Seen with zod 4.4.3 and Node 20: minimum -9007199254740991 and maximum 9007199254740991, the integers that a
# double holds, and additionalProperties false. So each structured answer and each tool that a JavaScript
# client describes with zod has bounds at the edge of what doubles hold, though its author named none: a server
# that refuses or rounds large bounds meets them in every request.
# Output seen: {"type":"integer","minimum":-9007199254740991,"maximum":9007199254740991} false
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund --prefix "$folder" zod@4.4.3
got=$(node -e '
const { z } = require("zod");
const made = z.toJSONSchema(z.object({ age: z.int() }));
console.log(JSON.stringify(made.properties.age), made.additionalProperties);
')
echo "$got"
[ "$got" = '{"type":"integer","minimum":-9007199254740991,"maximum":9007199254740991} false' ]
