"""A bash script that completes the commands of mpifl, their options, and the keys of the configuration.

The script is static: it needs no start of Python at each key stroke. Configurations are completed as files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mpifl.experiment.reference import Key

SCRIPT = """# bash completion of mpifl: eval "$(mpifl completion bash)"
_mpifl() {{
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
    elif [[ $command == show ]]; then
        COMPREPLY=($(compgen -W "{names}" -- "$word"))
    elif [[ $command == docs ]]; then
        COMPREPLY=($(compgen -W "{pages}" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -F _mpifl mpifl
"""
CASE = '{indent}{pattern}) COMPREPLY=($(compgen -W "{words}" -- "$word")){more};;'


def bash(commands: Mapping[str, Iterable[str]], keys: Iterable[Key], pages: Iterable[str]) -> str:
    """Return the script.

    Args:
        commands: command -> its arguments: options as they are typed, and names in capitals; CONFIG takes the
            keys of the configuration as options, too.
        keys: of the configuration.
        pages: of the documentation.
    """
    every = list(keys)
    paths = [*dict.fromkeys(key.path for key in every)]
    chosen: dict[str, list[str]] = {}
    for key in every:
        values = key.choices or (("true", "false") if key.type == "bool" else ())
        ends = (f"--{key.path}", f"--{key.path}.name") if key.is_section else (f"--{key.path}",)
        for option in ends if values else ():
            chosen.setdefault(option, [])
            chosen[option] += [value for value in values if value not in chosen[option]]
    cases = [
        CASE.format(indent=8 * " ", pattern=option, words=" ".join(values), more="; return")
        for option, values in chosen.items()
    ]
    options = []
    for name, arguments in commands.items():
        words = [word for word in arguments if word.startswith("-")]
        words += [f"--{path}" for path in paths] if "CONFIG" in arguments else []
        options.append(CASE.format(indent=12 * " ", pattern=name, words=" ".join(words), more=" "))
    names = " ".join(
        [*paths, *dict.fromkeys(value for key in every if key.is_section for value in key.choices)]
    )
    return SCRIPT.format(
        commands=" ".join(commands),
        values="\n".join(cases),
        options="\n".join(options),
        names=names,
        pages=" ".join(pages),
    )
