#!/usr/bin/env bash
# Tries an image that was built from Dockerfile or Dockerfile.cuda: it generates where there is no network, is not
# root, serves, becomes healthy and ends when it is told to.
#
#   scripts/try_image.sh [IMAGE]      its name (eecore)
set -euo pipefail
image=${1:-eecore}

docker run --rm --network none "$image" info
docker run --rm --network none "$image" generate "lock the front door" | grep HassTurnOn
user=$(docker run --rm --entrypoint id "$image" -u)
if [ "$user" = 0 ]; then
  echo "try_image: expected a user that is not root, got $user" >&2
  exit 1
fi

container=$(docker run --detach --publish 127.0.0.1::8000 "$image")
trap 'docker logs "$container"; docker rm --force "$container" >/dev/null' EXIT
for _ in $(seq 60); do
  health=$(docker inspect --format '{{.State.Health.Status}}' "$container")
  if [ "$health" = healthy ]; then break; fi
  sleep 2
done
if [ "$health" != healthy ]; then
  echo "try_image: expected a healthy server within two minutes, got $health" >&2
  exit 1
fi
address=$(docker port "$container" 8000/tcp)
curl --fail --silent --show-error "http://$address/v1/completions" --header 'content-type: application/json' \
  --data '{"prompt": "lock the front door", "max_tokens": 32}' | grep HassTurnOn
docker stop --time 40 "$container" >/dev/null
code=$(docker inspect --format '{{.State.ExitCode}}' "$container")
if [ "$code" != 0 ] && [ "$code" != 143 ]; then
  echo "try_image: expected exit code 0 or 143 after SIGTERM, got $code" >&2
  exit 1
fi
