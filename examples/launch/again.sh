#!/bin/bash
# Runs a command again when it dies: until it ends with 0, or was asked to stop, or has died three times in a
# row within five minutes each. The command goes on from its newest checkpoint.
#   bash examples/launch/again.sh COMMAND [ARGUMENT...]
# SIGTERM and Ctrl-C are passed on, as SIGTERM or as ASK says, and the command saves. Its status is the status.

stop() {
  stopped=yes
  [[ $command ]] && kill "-${ASK:-TERM}" "$command"
}
command= stopped= strikes=0
trap stop TERM INT
while ((strikes < 3)); do
  began=$SECONDS
  "$@" &
  command=$!
  [[ $stopped ]] && stop # it was asked before there was a command
  wait "$command" || wait "$command" # the first one ends when a signal comes
  status=$?
  if ((status == 0 || status == 75)) || [[ $stopped ]]; then break; fi
  strikes=$((SECONDS - began < 300 ? strikes + 1 : 0))
  echo "again.sh: it ended with $status after $((SECONDS - began)) s" >&2
done
exit "$status"
