#!/bin/sh
# Runs the agent and starts it again when it dies: a container that exits can fail its Job, an
# agent that crashes must not. Status 0 is the agent's own wish to leave, and SIGTERM the pod's.
agent=
trap '' HUP USR1 USR2
trap 'kill -TERM "$agent" 2>/dev/null; exit 0' TERM INT
pause=1
while :; do
  /usr/bin/python3 -m sidecar "$@" &
  agent=$!
  wait "$agent"
  status=$?
  [ "$status" = 0 ] && exit 0
  echo "kitty-sidecar: the agent ended with status $status, starting it again in $pause s" >&2
  sleep "$pause" &
  agent=$!
  wait "$agent"
  [ "$pause" -lt 32 ] && pause=$((pause * 2))
done
