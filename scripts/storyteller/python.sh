# Sourced by the scripts next to it: sets `root` and `python`, an interpreter that has what they and llmcli need.
# Set PYTHON to choose the interpreter; where it lacks something, the environment of `scripts/test` is used.

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
source "$here/../environment.sh"
export PYTHONPATH="$root:$root/scripts${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
if ! "$python" -c 'import llmcli.cli.session, jinja2, numpy, safetensors, sentencepiece, torch' 2>/dev/null; then
    ensure_environment dev
    python=$venv/bin/python
fi
