#!/usr/bin/env bash
# Two R-nodes and an S-node on this machine, over TCP with a shared secret. Two streams run, one on each R-node; then one
# R-node is killed. Both streams end with the same text, because the S-node recomputes the lost sequence on the R-node
# that is left. (In fp32, so that recomputing rounds as decoding does.)
#
#   examples/two_r_nodes.sh [OPTIONS OF THE S-NODE]        e.g. --model ~/models/Llama-3.2-1B-Instruct
#
# Environment: PORT of the API (8000), R_PORTS of the R-nodes ("7300 7301"), KV_MEMORY of each (256MiB).
set -euo pipefail

port=${PORT:-8000}
read -r -a r_ports <<<"${R_PORTS:-7300 7301}"
url=http://127.0.0.1:$port

directory=$(mktemp -d)
pids=()
end() {
    kill "${pids[@]}" 2>/dev/null || true
    wait
    rm -rf "$directory"
}
trap end EXIT

head -c 32 /dev/urandom | base64 >"$directory/secret"

for r_port in "${r_ports[@]}"; do
    fastdecode-node --role r --listen "tcp://127.0.0.1:$r_port" --kv-memory "${KV_MEMORY:-256MiB}" --threads 1 \
        --secret-file "$directory/secret" 2>"$directory/r-$r_port.log" &
    pids+=($!)
done

# The S-node waits for R-nodes that are not up yet.
fastdecode-node --role s --port "$port" --secret-file "$directory/secret" --dtype fp32 --kv-dtype fp32 \
    --connect-seconds 30 --r-node "tcp://127.0.0.1:${r_ports[0]}" --r-node "tcp://127.0.0.1:${r_ports[1]}" "$@" 2>"$directory/s.log" &
pids+=($!)
until curl -sf "$url/health" >"$directory/health"; do
    kill -0 "${pids[2]}" || { cat "$directory"/*.log && exit 1; }
    sleep 0.2
done
model=$(curl -s "$url/v1/models" | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')

# Placement is by load, so the streams begin on different R-nodes.
stream() {
    curl -sN "$url/v1/completions" -H 'Content-Type: application/json' -d '{"model": "'"$model"'", "prompt": "It was a",
        "max_tokens": 300, "temperature": 0, "stream": true, "ignore_eos": true}' >"$directory/stream-$1"
}
streams=()
for i in 1 2; do
    stream $i &
    streams+=($!)
done
events() { grep -c '^data: {' "$directory/stream-$1" 2>/dev/null || true; }
until (($(events 1) > 20 && $(events 2) > 20)); do sleep 0.02; done

echo "Killing the R-node on port ${r_ports[0]}, after $(events 1) and $(events 2) events of the streams."
disown "${pids[0]}" # the shell need not say that it was killed
kill -KILL "${pids[0]}"
wait "${streams[@]}"
until grep -h 'was lost' "$directory/s.log"; do
    kill -0 "${pids[2]}" # the S-node runs
    sleep 0.1
done

text() { sed -n 's/^data: {/{/p' "$directory/stream-$1" | python3 -c '
import json, sys
print("".join(json.loads(line)["choices"][0]["text"] for line in sys.stdin))'; }
echo "The streams ended after $(events 1) and $(events 2) events."
first=$(text 1) second=$(text 2)
[ -n "$first" ] || { echo "They have no text." && exit 1; }
[ "$first" = "$second" ] || { echo "$first" && echo "$second" && echo "Their texts differ." && exit 1; }
echo "$first"
echo "Both streams have this text, character for character."
