# For scripts that source it. step MESSAGE COMMAND...: runs the command, with its output at the end of the file $log, and shows
# how far the compiler is, by ninja's "[3/27]": on a terminal always, otherwise every 20 seconds.
step() {
    local begin=$SECONDS shown=$SECONDS now pid old
    old=$(stat -c %s "$log")
    echo "qccl: $1" >&2
    "${@:2}" >>"$log" 2>&1 &
    pid=$!
    trap 'kill "$pid" 2>/dev/null' EXIT
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        now=$(tail -c "+$((old + 1))" "$log" | grep -oE '^ *\[[0-9]+/[0-9]+\]' | tail -n 1 | tr -d ' ') || true
        if [ -t 2 ]; then
            printf '\r      %s %d s ' "$now" $((SECONDS - begin)) >&2
        elif [ $((SECONDS - shown)) -ge 20 ]; then
            echo "      $now $((SECONDS - begin)) s" >&2
            shown=$SECONDS
        fi
    done
    trap - EXIT
    if [ -t 2 ]; then echo >&2; fi
    wait "$pid" || {
        tail -n 30 "$log" >&2
        echo "qccl: this failed: $1; all that pip said is in $log" >&2
        exit 1
    }
    echo "      took $((SECONDS - begin)) s" >&2
}
