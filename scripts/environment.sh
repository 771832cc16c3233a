# Sourced by the other scripts: one virtual environment, .venv, made on first use and again when its inputs change.
# Set PYTHON to choose the interpreter.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"

# wanted_extras EXTRA...: these, and the CUDA extra for the installed driver if there is one, separated by commas.
# Tests compile the kernels also without a driver; two CuPy packages would overwrite each other, so never both extras.
wanted_extras() {
    local version='' list
    if command -v nvidia-smi >/dev/null; then
        version=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p' | head -n 1) || true
    fi
    if [ "${version:-0}" -ge 13 ]; then
        set -- "$@" cuda13
    elif [ "${version:-0}" -eq 12 ]; then
        set -- "$@" cuda12
    elif [[ " $* " == *" dev "* ]]; then
        set -- "$@" compile
    fi
    list=$(printf ',%s' "$@")
    echo "${list#,}"
}

# ensure_environment EXTRA...: the environment with llmcli in it and these extras.
ensure_environment() {
    local python=${PYTHON:-python3}
    local extras inputs stamp
    extras=$(wanted_extras "$@")
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "error: $python is missing or older than Python 3.11; install one, or set PYTHON" >&2
        return 1
    fi
    inputs=$({ cat "$root/pyproject.toml" "$root/scripts/constraints.txt"; "$python" -V; } | cksum | tr ' ' '-')
    stamp="$venv/ready-$inputs-${extras:-base}"
    [ -e "$stamp" ] && return 0
    (
        if command -v flock >/dev/null && ! flock --nonblock 9; then
            echo "waiting: another command is setting up $venv" >&2
            flock 9
        fi
        [ -e "$stamp" ] && exit 0
        # Whatever the environment was ready for before may be replaced from here on.
        for old in "$venv"/ready-*; do
            case $old in "$venv/ready-$inputs-"*) ;; *) rm -f "$old" ;; esac
        done
        "$python" "$root/scripts/set_up.py" "$venv" "$extras" || exit
        : >"$stamp"
    ) 9>"$root/.venv.lock"
}
