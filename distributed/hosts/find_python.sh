# Finds a Python that can train. Read by tools/setup.sh on this machine, and sent to hosts by agent_call.py: POSIX sh.

# Prints its own path and returns 0 if this Python can train and has the modules that are named. Else prints why not,
# and returns 3 if it can at least answer questions (3.9), 1 if not.
# The range is that of pyproject.toml, since torch has wheels for no other. A Python of an Intel Homebrew runs on an
# Apple chip too, under Rosetta, and `uname` tells of the shell, not of it: so the Python itself is asked.
JUDGE='
import os, platform, sys, sysconfig
oldest, newest, version = (3, 11), (3, 14), sys.version_info[:2]
def no(why):
    print(why)
    sys.exit(3 if (3, 9) <= version else 1)
if not oldest <= version <= newest:
    no("%d.%d, needs %d.%d to %d.%d" % (version + oldest + newest))
if sys.platform == "darwin" and platform.machine() != "arm64":
    universal = sysconfig.get_platform().endswith("universal2")
    no("runs as Intel code, because its terminal runs under Rosetta" if universal else "built for Intel")
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    no("free-threaded, for which packages have no builds")
if platform.python_implementation() != "CPython":
    no(platform.python_implementation() + ", for which torch has no builds")
if sys.prefix != sys.base_prefix and not os.path.isdir(sysconfig.get_path("purelib")):
    no("now %d.%d, and its packages are those of another version" % version)
for module in sys.argv[1:]:
    try:
        __import__(module)
    except ImportError:
        no("cannot make an environment, since its %s is missing (Debian: python3-venv)" % module)
print(sys.executable)
'

# judge PYTHON MODULE...: sets `said`. Without the command line tools, macOS's /usr/bin/python3 only opens a dialogue:
# it is tried only after asking.
judge() {
    judged=$1
    shift
    case "$judged" in /usr/bin/python3)
        if [ "$(uname)" = Darwin ] && ! xcode-select -p >/dev/null 2>&1; then
            said="only offers to install the command line tools"
            return 1
        fi ;;
    esac
    said=$("$judged" -I -c "$JUDGE" "$@" 2>/dev/null) && set -- 0 || set -- $?
    # Only the last line: its site packages may print something before.
    said=${said##*"
"}
    [ -n "$said" ] || said="does not run"
    return "$1"
}

# find_python NAME...: sets `found` to the first that can train and make an environment, or to nothing; `other` to the
# first of the others that can at least answer questions; `passed` to those tried before, a line for each. A shim (pyenv)
# is slow, so `found` is the interpreter behind it.
find_python() {
    found="" other="" tried=":" before=$IFS
    IFS=:
    for name in "$@"; do
        for folder in $PATH /opt/homebrew/bin /usr/local/bin /usr/bin /opt/local/bin \
            /Library/Frameworks/Python.framework/Versions/*/bin "${HOME:-}"/.local/bin "${HOME:-}"/.pyenv/versions/*/bin \
            "${HOME:-}"/.local/share/uv/python/*/bin; do
            case "$name" in */*) python=$name ;; *) python="${folder%/}/$name" ;; esac
            case "$tried" in *":$python:"*) continue ;; esac
            tried="$tried$python:"
            [ -x "$python" ] || continue
            if judge "$python" ensurepip venv; then
                found=$said IFS=$before
                return
            else
                [ $? != 3 ] || other=${other:-$python}
            fi
            passed="$passed$python: $said
"
        done
    done
    IFS=$before
}
passed=""
