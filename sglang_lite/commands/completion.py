"""`sglang-lite completion`: scripts that let shells complete commands and flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

Words: TypeAlias = Mapping[str, Sequence[str]]  # flags and actions of each command


def _bash_script(words: Words) -> str:
    cases = "\n".join(f'    {name}) words="{" ".join(own)}" ;;' for name, own in words.items())
    return f"""\
_sglang_lite() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" words="{" ".join(words)}"
  [ "$COMP_CWORD" -gt 1 ] && case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  [ "$COMP_CWORD" -gt 1 ] && COMPREPLY+=($(compgen -f -- "$current"))
  return 0
}}
complete -o filenames -F _sglang_lite sglang-lite
"""


def _zsh_script(words: Words) -> str:
    cases = "\n".join(f"    {name}) compadd -- {' '.join(own)} ;;" for name, own in words.items())
    return f"""\
#compdef sglang-lite
_sglang_lite() {{
  if (( CURRENT == 2 )); then
    compadd -- {" ".join(words)}
    return
  fi
  case "$words[2]" in
{cases}
  esac
  _files
}}
compdef _sglang_lite sglang-lite
"""


def _fish_script(words: Words) -> str:
    lines = [f"complete -c sglang-lite -n __fish_use_subcommand -f -a '{' '.join(words)}'"]
    for name, own in words.items():
        there = f"complete -c sglang-lite -n '__fish_seen_subcommand_from {name}'"
        lines += [
            f"{there} -l {each[2:]}" if each.startswith("--") else f"{there} -a {each}"
            for each in own
        ]
    return "\n".join(lines) + "\n"


SHELLS: Final[Mapping[str, Callable[[Words], str]]] = {
    "bash": _bash_script,
    "zsh": _zsh_script,
    "fish": _fish_script,
}
