# Part of launch/tpu.sh: creates, describes and deletes a TPU.
# shellcheck shell=bash

# --- State ---------------------------------------------------------------------------------------

# describe tpu-vm|queued-resources FIELD: the field, NONE if it does not exist, or UNREACHABLE (with
# the reason in $ERRORS). A dry run assumes a READY TPU with one worker.
describe() {
  local value query=(gcloud compute tpus "$1" describe "$TPU_NAME" "${PLACE[@]}" --format="value($2)")
  if [[ -n $DRY_RUN ]]; then
    printf '%s\n' "$(quoted "${query[@]}")" >&3
    case $1:$2 in
      queued-resources:*) printf NONE ;;
      *:state) printf READY ;;
      *) printf 1 ;;
    esac
  elif value="$("${query[@]}" 2>"$ERRORS")"; then
    printf '%s' "${value:-UNKNOWN}"
  elif grep -qiE '(location|zone) [^ /]+ (is |was )?(not found|unknown|invalid)|(unknown|invalid) (location|zone)' \
    "$ERRORS"; then
    printf UNREACHABLE # a wrong ZONE: the TPU may be elsewhere
  elif grep -qiE 'not[_ ]found|HTTPError 404' "$ERRORS"; then
    printf NONE
  else
    printf UNREACHABLE
  fi
}

# The state of the node, or of the request in the queue while it has no node.
state() {
  local request node
  request="$(describe queued-resources state.state)"
  case $request in
    NONE | ACTIVE) ;;
    *)
      printf '%s' "$request"
      return
      ;;
  esac
  node="$(describe tpu-vm state)"
  if [[ $request == ACTIVE && $node == NONE ]]; then
    printf LOST
  else
    printf '%s' "$node"
  fi
}

explain_unreachable() {
  sed 's/^/  /' "$ERRORS" >&2
  die "cannot read the state of TPU $TPU_NAME from Google Cloud (above): check the network, PROJECT," \
    "ZONE and \`gcloud auth login\`, then try again"
}

need_ready() {
  local found
  found="$(state)"
  case $found in
    READY) ;;
    UNREACHABLE) explain_unreachable ;;
    NONE) die "there is no TPU $TPU_NAME in $ZONE: run \`launch/tpu.sh create\`" ;;
    STOPPED | STOPPING)
      die "TPU $TPU_NAME is $found: start it with \`gcloud compute tpus tpu-vm start $TPU_NAME --zone=$ZONE\`"
      ;;
    *) die "TPU $TPU_NAME is $found, not READY: \`launch/tpu.sh create\` waits for it or replaces it" ;;
  esac
}

count_workers() {
  local count
  count="$(describe tpu-vm 'networkEndpoints.len()')"
  is_whole "$count" || die "cannot read the number of workers of TPU $TPU_NAME, got '$count': try again"
  printf '%s' "$count"
}

# --- create and delete ---------------------------------------------------------------------------

runtime_version() {
  if [[ -n $RUNTIME_VERSION ]]; then
    printf '%s' "$RUNTIME_VERSION"
    return
  fi
  case $ACCELERATOR_TYPE in
    v6e-*) printf v2-alpha-tpuv6e ;;
    v5p-*) printf v2-alpha-tpuv5 ;;
    v5litepod-*) printf v2-alpha-tpuv5-lite ;;
    v2-* | v3-* | v4-*) printf tpu-ubuntu2204-base ;;
    *) die "no runtime is known for ACCELERATOR_TYPE=$ACCELERATOR_TYPE: set RUNTIME_VERSION" ;;
  esac
}

# make VERSION: requests the TPU.
make() {
  local version="$1" flags=() until=()
  read -ra flags <<<"$CREATE_FLAGS"
  [[ -z $VALID_UNTIL_DURATION ]] || until=(--valid-until-duration="$VALID_UNTIL_DURATION")
  local node=(gcloud compute tpus tpu-vm create "$TPU_NAME" "${PLACE[@]}"
    --accelerator-type="$ACCELERATOR_TYPE" --version="$version")
  local request=(compute tpus queued-resources create "$TPU_NAME" "${PLACE[@]}"
    --node-id="$TPU_NAME" --accelerator-type="$ACCELERATOR_TYPE" --runtime-version="$version"
    "${until[@]}")
  case $MODE in
    on-demand) act "${node[@]}" "${flags[@]}" ;;
    spot) act "${node[@]}" --spot "${flags[@]}" ;;
    queued) act gcloud "${request[@]}" "${flags[@]}" ;;
    queued-spot) act gcloud "${request[@]}" --spot "${flags[@]}" ;;
    # Only the alpha command has these flags.
    flex-start)
      act gcloud alpha "${request[@]}" --provisioning-model=flex-start \
        --max-run-duration="$MAX_RUN_DURATION" "${flags[@]}"
      ;;
  esac
}

# Why Google Cloud refused, from the message in $ERRORS.
refusal() {
  # A limit of requests per minute is temporary; a quota of chips is not.
  if grep -qiE 'quota.* (limit|exceed)|exceed.* quota|insufficient quota|quota limit' "$ERRORS" &&
    ! grep -qiE 'per (minute|100 seconds)' "$ERRORS"; then
    printf quota
  elif grep -qiE 'capacity|RESOURCE_POOL_EXHAUSTED|enough resources' "$ERRORS"; then
    printf capacity
  elif grep -qiE 'PERMISSION_DENIED|permission|is disabled|has not been used|active account|credentials' \
    "$ERRORS"; then
    printf permission
  elif grep -qiE 'INVALID_ARGUMENT|unrecognized arguments|invalid|not found|NOT_FOUND' "$ERRORS"; then
    printf invalid
  else
    printf other
  fi
}

# Ends `create` when another attempt cannot help.
refuse_for_good() {
  local left
  left="$(state)"
  case $left in
    NONE | UNREACHABLE) ;;
    *)
      say "deleting the half-made TPU $TPU_NAME ($left)"
      remove
      ;;
  esac
  case $1 in
    quota)
      die "the project's quota does not allow $ACCELERATOR_TYPE ($MODE) in $ZONE: request more under" \
        "IAM & Admin > Quotas (Cloud TPU API), or set another ZONE, ACCELERATOR_TYPE or MODE" \
        "(spot and on-demand TPUs have separate quotas)"
      ;;
    permission)
      die "Google Cloud denied the request (above): run \`gcloud auth login\`, enable the Cloud TPU API" \
        "(gcloud services enable tpu.googleapis.com) and get the role TPU Admin in PROJECT"
      ;;
    invalid)
      die "Google Cloud does not know such a TPU (above): list the values of ACCELERATOR_TYPE with" \
        "\`gcloud compute tpus accelerator-types list --zone=$ZONE\`"
      ;;
    capacity)
      die "$ZONE had no free $ACCELERATOR_TYPE in $CREATE_ATTEMPTS attempts: try another ZONE," \
        "or MODE=queued or flex-start, which wait in Google's queue"
      ;;
    *) die "could not create the TPU in $CREATE_ATTEMPTS attempts (above)" ;;
  esac
}

# try_to_make ATTEMPT VERSION
try_to_make() {
  local reason
  say "creating $ACCELERATOR_TYPE $TPU_NAME in $ZONE ($MODE), attempt $1 of $CREATE_ATTEMPTS"
  make "$2" 2>"$ERRORS" && return
  sed 's/^/  /' "$ERRORS" >&2
  # Another process, or an attempt whose reply was lost, created it: `create` checks again.
  if grep -qiE 'already[_ ]exists' "$ERRORS"; then return; fi
  reason="$(refusal)"
  case $reason in
    quota | permission | invalid) refuse_for_good "$reason" ;;
  esac
  (($1 < CREATE_ATTEMPTS)) || refuse_for_good "$reason"
  say "failed ($reason): trying again in $RETRY_SECONDS s"
  sleep "$RETRY_SECONDS"
}

check_kind() {
  local kind
  kind="$(describe tpu-vm acceleratorType)"
  [[ ${kind##*/} == "$ACCELERATOR_TYPE" ]] ||
    die "TPU $TPU_NAME exists and is a ${kind##*/}, not a $ACCELERATOR_TYPE: delete it, or set" \
      "another TPU_NAME"
}

create() {
  local attempts=0 found last="" began=$SECONDS version
  [[ $MODE =~ ^(on-demand|spot|queued|queued-spot|flex-start)$ ]] ||
    die "MODE must be on-demand, spot, queued, queued-spot or flex-start, got $MODE"
  version="$(runtime_version)" || exit 1
  if [[ -n $DRY_RUN ]]; then
    state >/dev/null
    make "$version"
    return
  fi
  while true; do
    found="$(state)"
    case $found in
      READY)
        check_kind
        say "TPU $TPU_NAME is READY and costs money until \`launch/tpu.sh delete\`"
        return
        ;;
      NONE)
        attempts=$((attempts + 1))
        ((attempts <= CREATE_ATTEMPTS)) ||
          die "TPU $TPU_NAME was lost $CREATE_ATTEMPTS times before it was ready: try another ZONE"
        try_to_make "$attempts" "$version"
        began=$SECONDS
        ;;
      UNREACHABLE) explain_unreachable ;;
      CREATING | STARTING | RESTARTING | REIMAGING | REPAIRING | STOPPING | DELETING | ACCEPTED | \
        PROVISIONING | WAITING_FOR_RESOURCES | SUSPENDING)
        [[ $found == "$last" ]] || say "TPU $TPU_NAME is $found: waiting"
        ((SECONDS - began < WAIT_SECONDS)) ||
          die "TPU $TPU_NAME is still $found after $WAIT_SECONDS s: run \`create\` to keep waiting," \
            "or \`delete\` to give up"
        sleep "$POLL_SECONDS"
        ;;
      STOPPED)
        die "TPU $TPU_NAME is stopped and keeps its disk: start it with" \
          "\`gcloud compute tpus tpu-vm start $TPU_NAME --zone=$ZONE\`, or delete it and its disk with" \
          "\`launch/tpu.sh delete\`"
        ;;
      *)
        say "TPU $TPU_NAME is $found: deleting it and creating it again"
        remove
        ;;
    esac
    last=$found
  done
}

# Deletes the request and the node; reports what could not be deleted.
remove() {
  local attempt request node
  for ((attempt = 1; attempt <= 3; attempt++)); do
    request="$(describe queued-resources state.state)"
    if [[ $request != NONE ]]; then
      gcloud compute tpus queued-resources delete "$TPU_NAME" "${PLACE[@]}" --force || true
    fi
    node="$(describe tpu-vm state)"
    if [[ $node != NONE ]]; then
      gcloud compute tpus tpu-vm delete "$TPU_NAME" "${PLACE[@]}" || true
    fi
    request="$(describe queued-resources state.state)"
    node="$(describe tpu-vm state)"
    [[ $request != NONE || $node != NONE ]] || return 0
    say "TPU $TPU_NAME is still there (node $node, request $request): deleting it again"
    sleep "$POLL_SECONDS"
  done
  die "TPU $TPU_NAME could not be deleted (node $node, request $request) AND MAY COST MONEY: run" \
    "\`launch/tpu.sh delete\` again, or delete it in the console"
}

delete() {
  if [[ -n $DRY_RUN ]]; then
    state >/dev/null
    act gcloud compute tpus queued-resources delete "$TPU_NAME" "${PLACE[@]}" --force
    act gcloud compute tpus tpu-vm delete "$TPU_NAME" "${PLACE[@]}"
    return
  fi
  local request node
  request="$(describe queued-resources state.state)"
  node="$(describe tpu-vm state)"
  [[ $request != UNREACHABLE || $node != UNREACHABLE ]] || explain_unreachable
  [[ $request != NONE || $node != NONE ]] ||
    die "there is no TPU $TPU_NAME in $ZONE${PROJECT:+ of project $PROJECT}, so nothing is deleted. A TPU" \
      "elsewhere costs money: list all with \`gcloud compute tpus tpu-vm list --zone=-\`, then set ZONE," \
      "PROJECT and TPU_NAME"
  remove
  say "TPU $TPU_NAME is deleted${BUCKET:+; $BUCKET keeps its files and costs money}"
}
