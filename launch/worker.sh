#!/usr/bin/env bash
# Runs on each host for launch/tpu.sh, skypilot.yaml and jobset.yaml: bash launch/worker.sh ACTION.
#
#   install        installs this checkout in .venv
#   run ARG ...    runs `specjax COMMAND ARG ...` in the foreground; with BUCKET, first reads the
#                  results of an earlier machine from there, and keeps copying the results to it
#   start ARG ...  the same in the background; does nothing if the run is active
#   status         prints specjax-worker INDEX running|done|failed STATUS|stopped|died|absent
#   stop           ends the run
set -euo pipefail

RUN_NAME="${RUN_NAME:-run}"
COMMAND="${COMMAND:-infer}"
BUCKET="${BUCKET:-}"
DATA="${DATA:-}"
EXTRAS="${EXTRAS:-tpu,eval,int8,constraints,gguf}"
PYTHON="${PYTHON:-}"
SYNC_SECONDS="${SYNC_SECONDS:-60}"
RETRY_SECONDS="${RETRY_SECONDS:-10}"

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
OUTPUT="$ROOT/runs/$RUN_NAME"
SPECJAX="$ROOT/.venv/bin/specjax"

say() { printf 'specjax worker %s: %s\n' "$INDEX" "$*" >&2; }

die() {
  say "$*"
  exit 1
}

# Like specjax for bad input: another attempt would end the same way.
refuse() {
  say "$*"
  exit 2
}

# The index of this host, as GKE, SkyPilot and Cloud TPU (t1v-n-0123abcd-w-3) give it.
host_index() {
  local index="${PROCESS_INDEX:-${TPU_WORKER_ID:-${SKYPILOT_NODE_RANK:-}}}"
  [[ -n $index || ! ${HOSTNAME:-} =~ -w-([0-9]+)$ ]] || index="${BASH_REMATCH[1]}"
  # Hosts with the same index would overwrite each other's results.
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

# A Python 3.11 or later that can create an environment; Ubuntu 22.04's own is older.
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
      [[ -z $PYTHON ]] || die "PYTHON must be Python 3.11 or later with ensurepip, got $PYTHON"
      say "no Python 3.11 or later found: installing one with uv"
      python3 -m pip install --quiet --user uv || die "pip cannot install uv: set PYTHON"
      python3 -m uv venv --quiet --seed --python 3.12 .venv || die "uv cannot install Python: set PYTHON"
    fi
  fi
  .venv/bin/pip install --quiet -c constraints.txt --editable ".[$EXTRAS]" ||
    die "pip cannot install specjax (above)"
  printf 'specjax-worker %s installed %s\n' "$INDEX" "$("$SPECJAX" --version)"
}

# patiently COMMAND ...: tries a command that uses the network three times.
patiently() {
  local attempt
  for attempt in 1 2; do
    "$@" && return
    say "failed (attempt $attempt of 3): $*"
    sleep "$RETRY_SECONDS"
  done
  "$@"
}

# Reads the log and the results of an earlier machine, unless this disk has newer ones.
pull() {
  local errors
  # This log replaces the older one.
  [[ -s $OUTPUT.log ]] || gcloud storage cat "$PLACE.log" 2>/dev/null || true
  [[ ! -d $OUTPUT ]] || return 0
  if errors="$(gcloud storage ls "$PLACE/" 2>&1 >/dev/null)"; then
    rm -rf "$OUTPUT.partial"
    mkdir -p "$OUTPUT.partial"
    patiently gcloud storage rsync --quiet --recursive "$PLACE" "$OUTPUT.partial" ||
      die "cannot read $PLACE: nothing was run"
    mv "$OUTPUT.partial" "$OUTPUT"
    say "continuing from $PLACE"
  elif ! grep -q 'matched no objects' <<<"$errors"; then
    die "cannot read $PLACE ($errors): check BUCKET and the service account's permissions"
  fi
}

# Copies the results to the bucket. The configuration of a run lists the run's files. It is copied
# after them and sent before them, so that it always lists every file in the bucket.
push() {
  local copy="$OUTPUT.copy" failed="" config errors
  if [[ -d $OUTPUT ]]; then
    rm -rf "$copy"
    errors="$(LC_ALL=C cp -R "$OUTPUT" "$copy" 2>&1)" || true # a temporary file may disappear
    if [[ $errors == *"No space left"* ]]; then
      rm -rf "$copy" # an incomplete file must not replace the one in the bucket
      printf '%s\n' "$errors" >&2
      return 1
    fi
    for config in "$OUTPUT"/*_config.json; do
      [[ ! -f $config ]] || cp "$config" "$copy${config#"$OUTPUT"}" 2>/dev/null || true
    done
    rm -f "$copy/.specjax.lock"
    for config in "$copy"/*_config.json; do
      [[ ! -f $config ]] || gcloud storage cp --quiet "$config" "$PLACE${config#"$copy"}" || failed=1
    done
    [[ -n $failed ]] || gcloud storage rsync --quiet --recursive "$copy" "$PLACE" || failed=1
  fi
  [[ ! -f $OUTPUT.log ]] || gcloud storage cp --quiet "$OUTPUT.log" "$PLACE.log" || failed=1
  [[ -z $failed ]]
}

# Ends at TERM, after the current copy.
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

run() {
  local status=0 child pusher="" command
  read -ra command <<<"$COMMAND" # one or two words
  cd "$ROOT"
  mkdir -p runs
  rm -f "$OUTPUT.status"
  [[ -x $SPECJAX ]] || die "specjax is not installed here: run launch/tpu.sh setup"
  if ((COUNT > 1)) && [[ $COMMAND != infer ]]; then
    printf '2\n' >"$OUTPUT.status"
    refuse "COMMAND=$COMMAND cannot run on $COUNT hosts: use one host"
  fi
  if [[ -n $BUCKET ]]; then
    PLACE="${BUCKET%/}/$RUN_NAME/worker-$INDEX"
    pull
  fi
  [[ -z $DATA ]] || patiently gcloud storage rsync --quiet --recursive "$DATA" data ||
    die "cannot read DATA=$DATA: check it and the service account's permissions"
  ((COUNT == 1)) || export SPECJAX_DISTRIBUTED=1 # one program; JAX finds its processes
  if [[ -n $BUCKET ]]; then
    keep_pushing & # no command before the program may fail and leave this alive
    pusher=$!
  fi
  "$SPECJAX" "${command[@]}" "$@" --gin.OUTPUT_DIR="$OUTPUT" &
  child=$!
  # A pre-empted machine first gets TERM: the results so far then go to the bucket.
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
      say "the last results are not in $PLACE, only in $OUTPUT on this machine"
      ((status != 0)) || status=1
    }
  fi
  printf '%s\n' "$status" >"$OUTPUT.status"
  if ((status == 3)); then
    # A restart would fail the same settings.
    say "some settings failed (above), all others are measured"
    return 0
  fi
  return "$status"
}

# running NAME: whether the run's process is alive, and not another one with the same number.
running() {
  local pid
  pid="$(cat "$ROOT/runs/$1.pid" 2>/dev/null)" || return 1
  ps -o args= -p "$pid" 2>/dev/null | grep -q 'launch/worker.sh run'
}

start() {
  local other pid told gin="$OUTPUT.gin"
  cd "$ROOT"
  [[ -x $SPECJAX ]] || die "specjax is not installed here: run launch/tpu.sh setup"
  mkdir -p runs
  exec 9>runs/.start.lock # so that two calls do not both start it
  flock 9
  [[ ! -f $gin.new ]] || gin="$gin.new"
  told="$COMMAND $*"
  [[ ! -f $gin ]] || told+=$'\n'"$(cksum <"$gin")"
  if running "$RUN_NAME"; then
    rm -f "$OUTPUT.gin.new"
    [[ $told == "$(cat "$OUTPUT.arguments" 2>/dev/null)" ]] ||
      refuse "run $RUN_NAME is active with other arguments or another gin file" \
        "($(head -n 1 "$OUTPUT.arguments")): stop it first"
    printf 'specjax-worker %s already runs\n' "$INDEX"
    return
  fi
  for other in runs/*.pid; do
    other="$(basename "$other" .pid)"
    ! running "$other" || refuse "run $other uses the TPU: stop it with RUN_NAME=$other launch/tpu.sh stop"
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
    # The last copy to the bucket takes time.
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
  die "cannot tell which of $COUNT workers this is (HOSTNAME=${HOSTNAME:-}): set PROCESS_INDEX"
for name in INDEX COUNT; do
  # Before any arithmetic, which would run a command in its text.
  [[ ${!name} =~ ^(0|[1-9][0-9]{0,8})$ ]] || die "$name must be a whole number, got '${!name}'"
done
case $COMMAND in
  infer | evaluate | compare | train | "train drafter" | "train head") ;;
  *) refuse "COMMAND must be infer, evaluate, compare, train, 'train drafter' or 'train head', got '$COMMAND'" ;;
esac
((INDEX < COUNT)) || die "PROCESS_INDEX must be below PROCESS_COUNT, got $INDEX of $COUNT: set both"
case ${1:-} in
  install | run | start | status | stop) "$@" ;;
  *) die "usage: bash launch/worker.sh install|run|start|status|stop [ARGUMENT ...]" ;;
esac
