#!/usr/bin/env bash
# Penstock with curl: one answer, then one as a stream. PENSTOCK_URL names another gateway, PENSTOCK_API_KEY its key.
set -euo pipefail
url=${PENSTOCK_URL:-http://127.0.0.1:8000}
curl() { command curl -fsS -H "Authorization: Bearer ${PENSTOCK_API_KEY:-unused}" "$@"; }
model=$(curl "$url/v1/models" | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')

curl "$url/v1/chat/completions" -H 'Content-Type: application/json' -d '{
  "model": "'"$model"'",
  "messages": [{"role": "user", "content": "Why is the sky blue?"}],
  "max_completion_tokens": 48,
  "temperature": 0
}'
echo

curl -N "$url/v1/completions" -H 'Content-Type: application/json' -d '{
  "model": "'"$model"'",
  "prompt": "The three primary colours are",
  "max_tokens": 24,
  "temperature": 0,
  "stream": true
}'
