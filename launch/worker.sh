#!/usr/bin/env bash
# What launch/tpu.sh, skypilot.yaml and jobset.yaml do on each host: bash launch/worker.sh ACTION.
#
#   install        an environment in .venv with this checkout
#   run ARG ...    `specjax COMMAND ARG ...` in the foreground; with BUCKET, what an earlier machine
#                  had written is read first, and what is written is copied there all the time
#   start ARG ...  the same in the background; one that runs already is left alone
#   status         one line: specjax-worker INDEX running|done|failed STATUS|stopped|died|absent
#   stop           ends it
set -euo pipefail

RUN_NAME="${RUN_NAME:-run}"
COMMAND="${COMMAND:-infer}"
BUCKET="${BUCKET:-}"
DATA="${DATA:-}"
EXTRAS="${EXTRAS:-tpu,eval}"
PYTHON="${PYTHON:-}"
SYNC_SECONDS="${SYNC_SECONDS:-60}"
RETRY_SECONDS="${RETRY_SECONDS:-10}"
REPLICAS="${REPLICAS:-}"
CHIPS_PER_HOST_BOUNDS="${CHIPS_PER_HOST_BOUNDS:-2,2,1}"

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
OUTPUT="$ROOT/runs/$RUN_NAME"
SPECJAX="$ROOT/.venv/bin/specjax"

say() { printf 'specjax worker %s: %s\n' "$INDEX" "$*" >&2; }

die() {
  say "$*"
  exit 1
}

# As specjax says bad input: another attempt would end the same way.
refuse() {
  say "$*"
  exit 2
}

# This host's place among the hosts: GKE, SkyPilot and Cloud TPU (t1v-n-0123abcd-w-3) say it.
host_index() {
  local index="${PROCESS_INDEX:-${TPU_WORKER_ID:-${SKYPILOT_NODE_RANK:-}}}"
  [[ -n $index || ! ${HOSTNAME:-} =~ -w-([0-9]+)$ ]] || index="${BASH_REMATCH[1]}"
  # One number for several hosts would have them write over each other.
  [[ -n $index || $COUNT == 1 ]] || return 1
  printf '%s' "${index:-0}"
}

host_count() {
  if [[ -n ${PROCESS_COUNT:-} ]]; then
    printf '%s' "$PROCESS_COUNT"
  elif [[ -n ${TPU_WORKER_HOSTNAMES:-} ]]; then
    tr ',' '\n' <<<"$TPU_WORKER_HOSTNAMES" | grep -c .
  elif [[ -n ${SKYPILOT_NODE_IPS:-} ]]; then
    grep -c . <<<"$SKYPILOT_NODE_IPS"
  else
    printf 1
  fi
}

# Python 3.11 or later that can make an environment; Ubuntu 22.04's own is older.
find_python() {
  local name
  for name in ${PYTHON:-python3.13 python3.12 python3.11 python3}; do
    if "$name" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s' "$name"
      return
    fi
  done
}

install() {
  local python
  cd "$ROOT"
  if [[ ! -x .venv/bin/pip ]]; then
    python="$(find_python)"
    if [[ -n $python ]]; then
      "$python" -m venv .venv
    else
      [[ -z $PYTHON ]] || die "PYTHON=$PYTHON is not Python 3.11 or later with ensurepip"
      say "no Python 3.11 or later is here: uv brings one"
      python3 -m pip install --quiet --user uv || die "pip cannot install uv: set PYTHON"
      python3 -m uv venv --quiet --seed --python 3.12 .venv || die "uv cannot bring Python: set PYTHON"
    fi
  fi
  .venv/bin/pip install --quiet -c constraints.txt --editable ".[$EXTRAS]" ||
    die "pip cannot install specjax (above)"
  printf 'specjax-worker %s installed %s\n' "$INDEX" "$("$SPECJAX" --version)"
}

# patiently COMMAND ...: three attempts of what goes over the network.
patiently() {
  local attempt
  for attempt in 1 2; do
    "$@" && return
    say "that failed (attempt $attempt of 3): $*"
    sleep "$RETRY_SECONDS"
  done
  "$@"
}

# Reads what an earlier machine has written; what is on this disk is newer.
pull() {
  local errors
  [[ ! -d $OUTPUT ]] || return 0
  if errors="$(gcloud storage ls "$PLACE/" 2>&1 >/dev/null)"; then
    rm -rf "$OUTPUT.partial"
    mkdir -p "$OUTPUT.partial"
    patiently gcloud storage rsync --quiet --recursive "$PLACE" "$OUTPUT.partial" ||
      die "$PLACE cannot be read: nothing was run"
    mv "$OUTPUT.partial" "$OUTPUT"
    gcloud storage cat "$PLACE.log" 2>/dev/null || true # this log takes the other's place
    say "goes on with what is in $PLACE"
  elif ! grep -q 'matched no objects' <<<"$errors"; then
    die "$PLACE cannot be read ($errors): check BUCKET and the service account's rights"
  fi
}

# Copies the results as they are now. The configuration lists the files of a run (or of a part of
# one, in a directory of its own): copied after them and sent before them, it never lacks one that is
# in the bucket.
push() {
  local copy="$OUTPUT.copy" failed="" config errors
  if [[ -d $OUTPUT ]]; then
    rm -rf "$copy"
    errors="$(LC_ALL=C cp -R "$OUTPUT" "$copy" 2>&1)" || true # a temporary file may go meanwhile
    if [[ $errors == *"No space left"* ]]; then
      rm -rf "$copy" # half a file must not replace what is in the bucket
      printf '%s\n' "$errors" >&2
      return 1
    fi
    for config in "$OUTPUT"/*_config.json "$OUTPUT"/part-*/*_config.json; do
      [[ ! -f $config ]] || cp "$config" "$copy${config#"$OUTPUT"}" 2>/dev/null || true
    done
    rm -f "$copy/.specjax.lock" "$copy"/part-*/.specjax.lock
    for config in "$copy"/*_config.json "$copy"/part-*/*_config.json; do
      [[ ! -f $config ]] || gcloud storage cp --quiet "$config" "$PLACE${config#"$copy"}" || failed=1
    done
    [[ -n $failed ]] || gcloud storage rsync --quiet --recursive "$copy" "$PLACE" || failed=1
  fi
  [[ ! -f $OUTPUT.log ]] || gcloud storage cp --quiet "$OUTPUT.log" "$PLACE.log" || failed=1
  [[ -z $failed ]]
}

# Ends at TERM, after a copy that is under way.
keep_pushing() {
  local nap="" ended=""
  trap 'ended=1; kill "$nap" 2>/dev/null || true' TERM
  while [[ -z $ended ]]; do
    sleep "$SYNC_SECONDS" >/dev/null 2>&1 &
    nap=$!
    [[ -z $ended ]] || kill "$nap"
    wait "$nap" || true
    [[ -n $ended ]] || push >/dev/null 2>"$OUTPUT.push" ||
      say "copying to $PLACE failed: $(tail -n 1 "$OUTPUT.push")"
  done
}

# Each host as a TPU of its own: else the TPU's runtime waits for the other hosts.
export_replica() {
  export SPECJAX_PROCESS_INDEX="$INDEX" SPECJAX_PROCESS_COUNT="$COUNT"
  ((COUNT > 1)) || return 0
  export TPU_SKIP_MDS_QUERY=1 TPU_WORKER_ID=0 TPU_WORKER_HOSTNAMES=localhost
  export TPU_HOST_BOUNDS=1,1,1 TPU_CHIPS_PER_HOST_BOUNDS="$CHIPS_PER_HOST_BOUNDS"
  export TPU_PROCESS_BOUNDS=1,1,1 TPU_CHIPS_PER_PROCESS_BOUNDS="$CHIPS_PER_HOST_BOUNDS"
}

run() {
  local status=0 child pusher="" command
  read -ra command <<<"$COMMAND" # of one word or two
  cd "$ROOT"
  mkdir -p runs
  rm -f "$OUTPUT.status"
  [[ -x $SPECJAX ]] || die "specjax is not installed here: launch/tpu.sh setup"
  if ((COUNT > 1)) && [[ -z $REPLICAS && $COMMAND != infer ]]; then
    printf '2\n' >"$OUTPUT.status"
    refuse "COMMAND=$COMMAND is no program of $COUNT hosts: compare and evaluate take REPLICAS=1, others one host"
  fi
  if [[ -n $BUCKET ]]; then
    PLACE="${BUCKET%/}/$RUN_NAME/worker-$INDEX"
    pull
  fi
  [[ -z $DATA ]] || patiently gcloud storage rsync --quiet --recursive "$DATA" data ||
    die "DATA=$DATA cannot be read: check it and the service account's rights"
  if [[ -n $REPLICAS ]]; then
    export_replica
  elif ((COUNT > 1)); then
    export SPECJAX_DISTRIBUTED=1 # one program, whose processes JAX finds by itself
  fi
  if [[ -n $BUCKET ]]; then
    keep_pushing & # nothing fails between it and the program, which would leave it alive
    pusher=$!
  fi
  "$SPECJAX" "${command[@]}" "$@" --gin.OUTPUT_DIR="$OUTPUT" &
  child=$!
  # A machine that is taken away sends TERM first: what there is then goes to the bucket.
  trap 'kill -TERM "$child" 2>/dev/null || true' TERM INT
  while true; do
    status=0
    wait "$child" || status=$?
    kill -0 "$child" 2>/dev/null || break # a signal ends `wait` before the program ends
  done
  if [[ -n $pusher ]]; then
    kill "$pusher" 2>/dev/null || true
    wait "$pusher" || true
    patiently push || {
      say "the last results are not in $PLACE; they are in $OUTPUT of this machine"
      ((status != 0)) || status=1
    }
  fi
  printf '%s\n' "$status" >"$OUTPUT.status"
  if ((status == 3)); then
    # Another start would fail the same points; a failure here would also end the other replicas.
    say "all is measured but points that failed (above)"
    return 0
  fi
  return "$status"
}

# running NAME: whether that run's process is alive; a process of the same number is not it.
running() {
  local pid
  pid="$(cat "$ROOT/runs/$1.pid" 2>/dev/null)" || return 1
  ps -o args= -p "$pid" 2>/dev/null | grep -q 'launch/worker.sh run'
}

start() {
  local other pid told gin="$OUTPUT.gin"
  cd "$ROOT"
  [[ -x $SPECJAX ]] || die "specjax is not installed here: launch/tpu.sh setup"
  mkdir -p runs
  exec 9>runs/.start.lock # two at once would both start it
  flock 9
  [[ ! -f $gin.new ]] || gin="$gin.new"
  told="$COMMAND${REPLICAS:+ --replicas} $*"
  [[ ! -f $gin ]] || told+=$'\n'"$(cksum <"$gin")"
  if running "$RUN_NAME"; then
    rm -f "$OUTPUT.gin.new"
    [[ $told == "$(cat "$OUTPUT.arguments" 2>/dev/null)" ]] ||
      refuse "run $RUN_NAME is at work with other arguments or another gin file" \
        "($(head -n 1 "$OUTPUT.arguments")): stop it first"
    printf 'specjax-worker %s runs already\n' "$INDEX"
    return
  fi
  for other in runs/*.pid; do
    other="$(basename "$other" .pid)"
    ! running "$other" || refuse "run $other has the TPU: RUN_NAME=$other launch/tpu.sh stop ends it"
  done
  rm -f "$OUTPUT.status"
  [[ ! -f $OUTPUT.gin.new ]] || mv "$OUTPUT.gin.new" "$OUTPUT.gin"
  printf '%s' "$told" >"$OUTPUT.arguments"
  setsid nohup bash "$ROOT/launch/worker.sh" run "$@" >>"$OUTPUT.log" 2>&1 </dev/null 9>&- &
  pid=$!
  printf '%s\n' "$pid" >"$OUTPUT.pid"
  printf 'specjax-worker %s started\n' "$INDEX"
}

status() {
  local what=absent code
  if running "$RUN_NAME"; then
    what=running
  elif code="$(cat "$OUTPUT.status" 2>/dev/null)"; then
    case $code in
      0) what="done" ;;
      stopped) what=stopped ;;
      *) what="failed $code" ;;
    esac
  elif [[ -f $OUTPUT.pid ]]; then
    what=died
  fi
  printf 'specjax-worker %s %s\n' "$INDEX" "$what"
}

stop() {
  local pid waited=0
  if running "$RUN_NAME"; then
    pid="$(<"$OUTPUT.pid")"
    kill -TERM "$pid"
    # The last copy to the bucket takes a while.
    while running "$RUN_NAME" && ((waited < 300)); do
      sleep 0.2
      waited=$((waited + 1))
    done
    ! running "$RUN_NAME" || kill -KILL -- "-$pid"
    printf 'stopped\n' >"$OUTPUT.status"
  fi
  printf 'specjax-worker %s stopped\n' "$INDEX"
}

INDEX="?"
COUNT="$(host_count)"
INDEX="$(host_index)" ||
  die "neither PROCESS_INDEX, TPU_WORKER_ID nor the name ${HOSTNAME:-?} says which of $COUNT workers this is: set one"
((INDEX < COUNT)) || die "this is worker $INDEX of $COUNT: set PROCESS_INDEX and PROCESS_COUNT"
case ${1:-} in
  install | run | start | status | stop) "$@" ;;
  *) die "usage: bash launch/worker.sh install|run|start|status|stop [ARGUMENT ...]" ;;
esac
