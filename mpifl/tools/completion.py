"""A script that completes the commands of mpifl in a shell: options, keys of the configuration, and names.

The script is static, so completion does not start Python at each key stroke.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpifl.experiment import contents, reference
from mpifl.tools import documentation, starter_files

SCRIPT = """_mpifl() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}}
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case $before in
{values}
    esac
    if [[ $word == -* ]]; then
        case $command in
{options}
        esac
        return
    fi
    case $command in
{names}
        *) COMPREPLY=($(compgen -f -- "$word"));;
    esac
}}
complete -o filenames -F _mpifl mpifl
"""
HEADS = {  # shell -> first lines of the script
    "bash": "# bash completion of mpifl: mpifl completion bash "
    "> ~/.local/share/bash-completion/completions/mpifl\n",
    "zsh": """# zsh completion of mpifl: mpifl completion zsh > ~/.mpifl.zsh; source that in ~/.zshrc
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
autoload -Uz bashcompinit && bashcompinit
""",
}
CASE = '{indent}{pattern}) COMPREPLY=($({files}compgen -W "{words}" -- "$word")){more};;'


def script(shell: str, commands: Mapping[str, Sequence[str]]) -> str:
    """Return the script.

    Args:
        shell: bash or zsh, which accepts the same script.
        commands: command -> its arguments: options as they are typed, and names in capitals. CONFIG stands
            for a file or the name of a configuration, and for the configuration keys as further options.
    """
    every = reference.keys()
    paths = [*dict.fromkeys(key.path for key in every)]
    chosen: dict[str, list[str]] = {}
    for key in every:
        catalogue = reference.catalogue_of(key)
        values = key.choices if catalogue is None else catalogue.known()
        values = values or (("true", "false") if key.type == "bool" else ())
        ends = (f"--{key.path}", f"--{key.path}.name") if key.is_section else (f"--{key.path}",)
        for option in ends if values else ():
            chosen.setdefault(option, [])
            chosen[option] += [value for value in values if value not in chosen[option]]
    options = []
    for name, arguments in commands.items():
        words = [word for word in arguments if word.startswith("-")]
        words += [f"--{path}" for path in paths] if "CONFIG" in arguments else []
        options.append(_case(name, words, 12))
    catalogues = filter(None, map(reference.catalogue_of, every))
    shown = [*paths, *dict.fromkeys(value for catalogue in catalogues for value in catalogue.known())]
    names = {
        "show": [reference.RUN, *shown, *contents.TABLES],
        "list": reference.kinds(),
        "docs": [*documentation.pages()],
        "init": [*starter_files.KINDS],
        "launch": [*starter_files.JOB_SCRIPTS],
        "completion": [*HEADS],
    }
    cases = [_case(name, words, 8) for name, words in names.items()]
    takers = "|".join(name for name, arguments in commands.items() if "CONFIG" in arguments)
    cases.append(_case(takers, [*reference.configurations()], 8, files=True))
    return HEADS[shell] + SCRIPT.format(
        commands=" ".join(commands),
        values="\n".join(_case(option, values, 8, more="; return") for option, values in chosen.items()),
        options="\n".join(options),
        names="\n".join(cases),
    )


def _case(pattern: str, words: Sequence[str], indent: int, files: bool = False, more: str = " ") -> str:
    """Return a line of `case` that offers words, and files if `files` is true."""
    return CASE.format(
        indent=indent * " ",
        pattern=pattern,
        words=" ".join(words),
        files='compgen -f -- "$word"; ' if files else "",
        more=more,
    )
