# Part of launch/tpu.sh: runs commands on the workers of a TPU.
# shellcheck shell=bash

# --- Workers -------------------------------------------------------------------------------------

# remote WORKERS COMMAND: runs a command over ssh.
remote() {
  local flags=()
  read -ra flags <<<"$SSH_FLAGS"
  act gcloud compute tpus tpu-vm ssh "$TPU_NAME" "${PLACE[@]}" --worker="$1" "${flags[@]}" \
    --command="$2"
}

# copy SOURCE DESTINATION [WORKER]: copies SOURCE to one worker, or to all.
copy() {
  local flags=()
  read -ra flags <<<"$SSH_FLAGS"
  act gcloud compute tpus tpu-vm scp "$1" "$TPU_NAME:$2" "${PLACE[@]}" --worker="${3:-all}" \
    "${flags[@]}"
}

# copy_to_all SOURCE DESTINATION WHAT: `copy` to all workers; if that fails, to each, to find those
# that fail.
copy_to_all() {
  local i failed=()
  patiently copy "$1" "$2" && return
  for ((i = 0; i < WORKERS; i++)); do
    copy "$1" "$2" "$i" || failed+=("$i")
  done
  ((${#failed[@]} == 0)) || blame "copying $3" "${failed[*]}"
}

# The command that runs launch/worker.sh on a worker, with the variables that it reads.
on_worker() {
  local variables=(RUN_NAME="$RUN_NAME" COMMAND="$COMMAND") name
  for name in BUCKET DATA EXTRAS PYTHON SYNC_SECONDS RETRY_SECONDS; do
    [[ -z ${!name} ]] || variables+=("$name=${!name}")
  done
  quoted env "${variables[@]}" PROCESS_COUNT="$WORKERS" bash "$REMOTE/launch/worker.sh" "$@"
}

# Repeats a command that uses the network.
patiently() {
  local attempt status
  for ((attempt = 1; attempt < SSH_ATTEMPTS; attempt++)); do
    "$@" && return
    status=$?
    ((status != 2)) || return 2 # a refusal
    say "failed (attempt $attempt of $SSH_ATTEMPTS): trying again"
    sleep "$POLL_SECONDS"
  done
  "$@"
}

# The workers, from 0, without a line `specjax-worker N ...` in a text.
silent_workers() {
  local i silent=()
  for ((i = 0; i < WORKERS; i++)); do
    grep -q "^specjax-worker $i " <<<"$1" || silent+=("$i")
  done
  printf '%s' "${silent[*]}"
}

# blame WHAT WORKERS
blame() {
  local where="on worker(s) $2${WORKERS:+ of $WORKERS}"
  [[ -n $2 ]] || where="(all $WORKERS worker(s) answered)"
  die "$1 failed $where: try again; if a worker never answers, run" \
    "\`launch/tpu.sh delete\`, then create, setup and run (which continues from BUCKET)"
}

# on_all WHAT COMMAND: runs a command that ends with launch/worker.sh on all workers. Each worker must
# answer, because gcloud returns the status of one worker only.
on_all() {
  local said="$SCRATCH/said" status=0 silent
  patiently remote all "$2" | tee "$said" || status=$?
  [[ -z $DRY_RUN ]] || return 0
  silent="$(silent_workers "$(<"$said")")"
  ((status == 0)) && [[ -z $silent ]] || blame "$1" "$silent"
}

setup() {
  local archive="$SCRATCH/specjax.tar.gz"
  need_ready
  WORKERS="$(count_workers)"
  # All files that git does not ignore, also gin files that are not committed yet.
  (cd "$ROOT" && git ls-files -z --cached --others --exclude-standard |
    while IFS= read -r -d '' file; do
      # git also lists deleted files, and a link .venv, which it does not ignore.
      [[ $file == .venv || ! -e $file && ! -L $file ]] || printf '%s\0' "$file"
    done |
    tar --null -czf "$archive" -T -) ||
    die "cannot pack $ROOT: setup needs a git checkout of specjax"
  copy_to_all "$archive" specjax.tar.gz "the checkout"
  local unpack="mkdir -p $REMOTE && tar -xzf specjax.tar.gz -C $REMOTE"
  on_all "setup" "$unpack && $(on_worker install)"
  [[ -n $DRY_RUN ]] || say "installed on $WORKERS worker(s)"
}

# --- run -----------------------------------------------------------------------------------------

start() {
  if [[ -n $LOCAL_GIN ]]; then
    on_all "making the directory of runs" "mkdir -p $REMOTE/runs && $(on_worker status)" >"$SCRATCH/status"
    # `.new`: an active run keeps its own file.
    copy_to_all "$LOCAL_GIN" "$REMOTE/runs/$RUN_NAME.gin.new" "the gin file"
  fi
  patiently remote all "$(on_worker start "${ARGUMENTS[@]}")" | tee "$SCRATCH/start" || {
    (($? != 2)) || die "the workers refused to start run $RUN_NAME (above)"
    blame "starting" "$(silent_workers "$(<"$SCRATCH/start")")"
  }
  # gcloud returns the status of a single worker.
  [[ -n $DRY_RUN || -z $(silent_workers "$(<"$SCRATCH/start")") ]] ||
    blame "starting" "$(silent_workers "$(<"$SCRATCH/start")")"
}

from_where() {
  if [[ -n $BUCKET ]]; then
    printf 'from the results in %s' "${BUCKET%/}/$RUN_NAME"
  else
    printf 'from the beginning, because BUCKET is not set'
  fi
}

# Replaces a lost TPU, at most RESTARTS times.
replace_tpu() {
  restart_allowed "TPU $TPU_NAME is $1"
  say "TPU $TPU_NAME is $1: creating it again; the run continues $(from_where)"
  create
  setup
  start
}

restart_allowed() {
  restarts=$((restarts + 1))
  # shellcheck disable=SC2153 # RESTARTS is a variable of launch/tpu.sh
  ((restarts <= RESTARTS)) ||
    die "$1, and all RESTARTS=$RESTARTS are used: see \`launch/tpu.sh logs\`; \`run\` continues from the" \
      "results so far"
}

# Acts on the workers' status lines. Returns 0 when all are done.
judge() {
  local said="$1" bad
  bad="$(grep -m 1 -E '^specjax-worker [0-9]+ failed 2$' <<<"$said" || true)"
  if [[ -n $bad ]]; then
    WORKER="$(cut -d ' ' -f 2 <<<"$bad")" logs || true
    die "worker $(cut -d ' ' -f 2 <<<"$bad") refused its input (above): correct it and run again"
  fi
  ! grep -qE '^specjax-worker [0-9]+ stopped' <<<"$said" ||
    die "the run was stopped: \`run\` continues from the results so far"
  # Status 3: done, except for settings that would fail again.
  bad="$(grep -v ' failed 3$' <<<"$said" |
    grep -m 1 -E '^specjax-worker [0-9]+ (failed|died|absent)' || true)"
  if [[ -n $bad ]]; then
    restart_allowed "${bad#specjax-}"
    say "${bad#specjax-}: restarting ($restarts of $RESTARTS)"
    # The workers of one program would wait for each other forever.
    on_all "stopping" "$(on_worker stop)"
    start
    return 1
  fi
  ! grep -q '^specjax-worker [0-9]* running' <<<"$said" || return 1
  bad="$(sed -n 's/^specjax-worker \([0-9]*\) failed 3$/\1/p' <<<"$said" | xargs)"
  [[ -z $bad ]] || say "some settings failed on worker(s) $bad, the others are done: see points.jsonl"
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
        # No network here, or Google's maintenance: the run continues, or is restarted afterwards.
        UNREACHABLE | REPAIRING | RESTARTING | STARTING)
          failures=0 # a machine needs time to come back
          say "worker(s) $silent do not answer, TPU $TPU_NAME is $found: waiting"
          if ((SECONDS - answered >= WAIT_SECONDS)); then
            [[ $found != UNREACHABLE ]] || explain_unreachable
            die "TPU $TPU_NAME is still $found after $WAIT_SECONDS s: call \`run\` again to keep watching"
          fi
          ;;
        READY)
          failures=$((failures + 1))
          say "worker(s) $silent do not answer, TPU $TPU_NAME is $found ($failures of $SSH_ATTEMPTS)"
          if ((failures >= SSH_ATTEMPTS)); then
            sed 's/^/  /' "$SCRATCH/ssh" >&2
            die "worker(s) $silent of TPU $TPU_NAME never answered: run \`launch/tpu.sh delete\`, then" \
              "create, setup and run, which continues $(from_where)"
          fi
          ;;
        STOPPED | STOPPING)
          die "somebody stopped TPU $TPU_NAME: start it, then \`run\` again"
          ;;
        NONE | DELETING)
          die "TPU $TPU_NAME was deleted: create, setup and run again, which continues $(from_where)"
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
      # A copy: a restart uses the same file, even if yours was edited.
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
    *) die "COMMAND=$COMMAND needs one worker, TPU $TPU_NAME has $WORKERS: choose an ACCELERATOR_TYPE with one host" ;;
  esac
  [[ -n $BUCKET ]] || say "warning: BUCKET is not set: a pre-emption loses the results"
  start
  if [[ -n $DRY_RUN ]]; then
    remote all "$(on_worker status)"
    return
  fi
  if [[ -n $DETACH ]]; then
    say "run $RUN_NAME is active on $WORKERS worker(s); the same command without --detach watches it"
    return
  fi
  say "watching run $RUN_NAME on $WORKERS worker(s); Ctrl-C ends the watching, not the run"
  watch
  say "run $RUN_NAME is done: \`launch/tpu.sh fetch\` copies the results, \`launch/tpu.sh delete\` ends the cost"
}

stop() {
  need_ready
  WORKERS="$(count_workers)"
  on_all "stopping" "$(on_worker stop)"
}

logs() {
  need_ready
  # shellcheck disable=SC2153 # WORKER is a variable of launch/tpu.sh
  remote "$WORKER" "tail -n $LINES_SHOWN $(quoted "$REMOTE/runs/$RUN_NAME.log")"
}

fetch() {
  local target="$FETCH_DIR/$RUN_NAME" flags=()
  act mkdir -p "$target"
  if [[ -n $BUCKET ]]; then
    act gcloud storage rsync --recursive "${BUCKET%/}/$RUN_NAME" "$target" ||
      die "cannot copy ${BUCKET%/}/$RUN_NAME: check BUCKET and RUN_NAME (gcloud storage ls $BUCKET)"
  else
    need_ready
    read -ra flags <<<"$SSH_FLAGS"
    # The other workers of one program write nothing.
    act mkdir -p "$target/worker-0"
    act gcloud compute tpus tpu-vm scp "$TPU_NAME:$REMOTE/runs/$RUN_NAME/*" "$target/worker-0/" \
      "${PLACE[@]}" --worker=0 --recurse "${flags[@]}" || blame "fetching" 0
  fi
  [[ -n $DRY_RUN ]] || say "the results are in $target"
}
