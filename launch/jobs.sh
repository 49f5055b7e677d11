# Part of launch/tpu.sh: what runs on the workers of a TPU.
# shellcheck shell=bash

# --- Workers -------------------------------------------------------------------------------------

# remote WORKERS COMMAND: runs a command over ssh.
remote() {
  local flags=()
  read -ra flags <<<"$SSH_FLAGS"
  act gcloud compute tpus tpu-vm ssh "$TPU_NAME" "${PLACE[@]}" --worker="$1" "${flags[@]}" \
    --command="$2"
}

# copy SOURCE DESTINATION: SOURCE to all workers.
copy() {
  local flags=()
  read -ra flags <<<"$SSH_FLAGS"
  act gcloud compute tpus tpu-vm scp "$1" "$TPU_NAME:$2" "${PLACE[@]}" --worker=all "${flags[@]}"
}

# The command for launch/worker.sh on a worker, with the variables that it reads.
on_worker() {
  local variables=(RUN_NAME="$RUN_NAME" COMMAND="$COMMAND") name
  for name in BUCKET DATA EXTRAS PYTHON SYNC_SECONDS RETRY_SECONDS REPLICAS CHIPS_PER_HOST_BOUNDS; do
    [[ -z ${!name} ]] || variables+=("$name=${!name}")
  done
  quoted env "${variables[@]}" PROCESS_COUNT="$WORKERS" bash "$REMOTE/launch/worker.sh" "$@"
}

# Repeats a command that goes over the network.
patiently() {
  local attempt status
  for ((attempt = 1; attempt < SSH_ATTEMPTS; attempt++)); do
    "$@" && return
    status=$?
    ((status != 2)) || return 2 # a refusal
    say "that failed, attempt $attempt of $SSH_ATTEMPTS"
    sleep "$POLL_SECONDS"
  done
  "$@"
}

# The workers, from 0, that have no line `specjax-worker N ...` in a text.
silent_workers() {
  local i silent=()
  for ((i = 0; i < WORKERS; i++)); do
    grep -q "^specjax-worker $i " <<<"$1" || silent+=("$i")
  done
  printf '%s' "${silent[*]}"
}

blame() {
  die "$1 failed on worker(s) ${2:-?} of $WORKERS: run it again; if a worker stays dead," \
    "\`launch/tpu.sh delete\`, then create, setup and run (which resumes what is in BUCKET)"
}

setup() {
  local archive="$SCRATCH/specjax.tar.gz" said="$SCRATCH/setup"
  need_ready
  WORKERS="$(count_workers)"
  # What git tracks, and what it does not ignore: also gin files that are not committed yet.
  (cd "$ROOT" && git ls-files -z --cached --others --exclude-standard |
    while IFS= read -r -d '' file; do
      # A file that is deleted and not committed is listed; a link .venv is not ignored.
      [[ $file == .venv || ! -e $file && ! -L $file ]] || printf '%s\0' "$file"
    done |
    tar --null -czf "$archive" -T -) ||
    die "cannot pack $ROOT: setup needs a git checkout of specjax"
  patiently copy "$archive" specjax.tar.gz || blame "copying the checkout"
  local unpack="mkdir -p $REMOTE && tar -xzf specjax.tar.gz -C $REMOTE"
  patiently remote all "$unpack && $(on_worker install)" | tee "$said" ||
    blame "setup" "$(silent_workers "$(<"$said")")"
  # gcloud's status is that of one of the workers.
  [[ -n $DRY_RUN || -z $(silent_workers "$(<"$said")") ]] ||
    blame "setup" "$(silent_workers "$(<"$said")")"
  [[ -n $DRY_RUN ]] || say "installed on $WORKERS worker(s)"
}

# --- run -----------------------------------------------------------------------------------------

start() {
  if [[ -n $LOCAL_GIN ]]; then
    patiently remote all "mkdir -p $REMOTE/runs" || blame "run"
    # `.new`: a run that is at work keeps its own.
    patiently copy "$LOCAL_GIN" "$REMOTE/runs/$RUN_NAME.gin.new" || blame "copying $LOCAL_GIN"
  fi
  patiently remote all "$(on_worker start "${ARGUMENTS[@]}")" || {
    (($? != 2)) || die "the worker(s) refuse to start $RUN_NAME (above)"
    blame "starting"
  }
}

from_where() {
  if [[ -n $BUCKET ]]; then
    printf 'with what is in %s' "${BUCKET%/}/$RUN_NAME"
  else
    printf 'from its beginning, for BUCKET is not set'
  fi
}

# Says what became of the TPU, and replaces it, as long as RESTARTS allows.
replace_tpu() {
  restart_allowed "TPU $TPU_NAME is $1"
  say "TPU $TPU_NAME is $1: it is made again, and the run goes on $(from_where)"
  create
  setup
  start
}

restart_allowed() {
  restarts=$((restarts + 1))
  # shellcheck disable=SC2153 # RESTARTS is a variable of launch/tpu.sh
  ((restarts <= RESTARTS)) ||
    die "$1, and RESTARTS=$RESTARTS were used: \`launch/tpu.sh logs\` may tell why; \`run\` again" \
      "goes on with what is there"
}

# One look at the workers' own words. Returns 0 when all are done.
judge() {
  local said="$1" bad
  bad="$(grep -m 1 -E '^specjax-worker [0-9]+ failed 2$' <<<"$said" || true)"
  if [[ -n $bad ]]; then
    WORKER="$(cut -d ' ' -f 2 <<<"$bad")" logs || true
    die "worker $(cut -d ' ' -f 2 <<<"$bad") refuses its input (above): correct it and run again"
  fi
  ! grep -qE '^specjax-worker [0-9]+ stopped' <<<"$said" ||
    die "the run was stopped: \`run\` again goes on with what is there"
  # With 3 it has ended, but for points that would fail again.
  bad="$(grep -v ' failed 3$' <<<"$said" |
    grep -m 1 -E '^specjax-worker [0-9]+ (failed|died|absent)' || true)"
  if [[ -n $bad ]]; then
    restart_allowed "${bad#specjax-}"
    say "${bad#specjax-}: started again ($restarts of $RESTARTS)"
    # The workers of one program wait for each other for ever; replicas do not know of each other.
    [[ -n $REPLICAS ]] || patiently remote all "$(on_worker stop)" || blame "stopping"
    start
    return 1
  fi
  ! grep -q '^specjax-worker [0-9]* running' <<<"$said" || return 1
  bad="$(sed -n 's/^specjax-worker \([0-9]*\) failed 3$/\1/p' <<<"$said" | xargs)"
  [[ -z $bad ]] || say "settings failed on worker(s) $bad, the others are done: points.jsonl says why"
}

watch() {
  local said silent found failures=0 restarts=0 answered=$SECONDS
  while true; do
    said="$(remote all "$(on_worker status)" 2>"$SCRATCH/ssh" || true)"
    silent="$(silent_workers "$said")"
    if [[ -z $silent ]]; then
      failures=0 answered=$SECONDS
      if judge "$said"; then return; fi
    else
      found="$(state)"
      case $found in
        # The network here, or Google's maintenance: the run goes on, or is started again after it.
        UNREACHABLE | REPAIRING | RESTARTING | STARTING)
          failures=0 # a machine that comes back needs its time
          say "worker(s) $silent do not answer, TPU $TPU_NAME is $found: waiting"
          if ((SECONDS - answered >= WAIT_SECONDS)); then
            [[ $found != UNREACHABLE ]] || explain_unreachable
            die "TPU $TPU_NAME is still $found after $WAIT_SECONDS s: \`run\` again watches it on"
          fi
          ;;
        READY)
          failures=$((failures + 1))
          say "worker(s) $silent do not answer, TPU $TPU_NAME is $found ($failures of $SSH_ATTEMPTS)"
          if ((failures >= SSH_ATTEMPTS)); then
            sed 's/^/  /' "$SCRATCH/ssh" >&2
            die "worker(s) $silent of TPU $TPU_NAME are dead: \`launch/tpu.sh delete\`, then create," \
              "setup and run, which goes on $(from_where)"
          fi
          ;;
        STOPPED | STOPPING)
          die "TPU $TPU_NAME is being stopped, by somebody: start it, and \`run\` again"
          ;;
        NONE | DELETING)
          die "TPU $TPU_NAME was deleted: create, setup and run start it again, and it goes on $(from_where)"
          ;;
        *) replace_tpu "$found" ;;
      esac
    fi
    sleep "$POLL_SECONDS"
  done
}

run() {
  [[ $# -ge 1 ]] || die "run needs a gin file: launch/tpu.sh run FILE.gin [ARGUMENT ...]"
  local file="$1"
  shift
  LOCAL_GIN=""
  if [[ -f $file ]]; then
    LOCAL_GIN="$file"
    if [[ -z $DRY_RUN ]]; then
      # As it is now: what is started again is the same, if the file is edited meanwhile.
      LOCAL_GIN="$SCRATCH/run.gin"
      cp "$file" "$LOCAL_GIN"
    fi
    file="runs/$RUN_NAME.gin"
  elif [[ ! -f $ROOT/gin_configs/$file ]]; then
    die "there is no gin file $file, here or in gin_configs"
  fi
  ARGUMENTS=(--gin_file="$file" "$@")
  need_ready
  WORKERS="$(count_workers)"
  case $((WORKERS > 1)):$COMMAND in
    0:* | 1:infer) ;;
    1:compare | 1:evaluate)
      [[ -n $REPLICAS ]] || die "COMMAND=$COMMAND on $WORKERS workers needs run --replicas"
      ;;
    *) die "COMMAND=$COMMAND takes one worker, TPU $TPU_NAME has $WORKERS: take an ACCELERATOR_TYPE of one host" ;;
  esac
  [[ -n $BUCKET ]] || say "warning: BUCKET is not set: what a pre-empted TPU has written is lost"
  start
  if [[ -n $DRY_RUN ]]; then
    remote all "$(on_worker status)"
    return
  fi
  if [[ -n $DETACH ]]; then
    say "$RUN_NAME runs on $WORKERS worker(s); the same command without --detach watches it"
    return
  fi
  say "$RUN_NAME runs on $WORKERS worker(s); Ctrl-C ends the watching, not the run"
  watch
  say "$RUN_NAME is done: \`launch/tpu.sh fetch\` copies it here, \`launch/tpu.sh delete\` ends the cost"
}

stop() {
  need_ready
  WORKERS="$(count_workers)"
  remote all "$(on_worker stop)" || blame "stopping"
}

logs() {
  need_ready
  # shellcheck disable=SC2153 # WORKER is a variable of launch/tpu.sh
  remote "$WORKER" "tail -n $LINES_SHOWN $(quoted "$REMOTE/runs/$RUN_NAME.log")"
}

fetch() {
  local i target="$FETCH_DIR/$RUN_NAME" flags=()
  act mkdir -p "$target"
  if [[ -n $BUCKET ]]; then
    act gcloud storage rsync --recursive "${BUCKET%/}/$RUN_NAME" "$target" ||
      die "${BUCKET%/}/$RUN_NAME cannot be copied: check BUCKET and RUN_NAME (gcloud storage ls $BUCKET)"
  else
    need_ready
    read -ra flags <<<"$SSH_FLAGS"
    WORKERS="$(count_workers)"
    for ((i = 0; i < WORKERS; i++)); do
      act mkdir -p "$target/worker-$i"
      act gcloud compute tpus tpu-vm scp "$TPU_NAME:$REMOTE/runs/$RUN_NAME/*" "$target/worker-$i/" \
        "${PLACE[@]}" --worker="$i" --recurse "${flags[@]}" || blame "fetching" "$i"
    done
  fi
  [[ -n $DRY_RUN ]] || say "the results are in $target"
}
