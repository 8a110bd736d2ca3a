"""Reads a Dockerfile into stages of instructions: as much of the format as this repository uses.

Format: https://docs.docker.com/reference/dockerfile/
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its keyword in capitals and the rest of its line, continuations joined."""

    keyword: str
    rest: str

    def exec_form(self) -> list[str]:
        """The JSON list of CMD, ENTRYPOINT or HEALTHCHECK ... CMD; raises ValueError if it is none."""
        text = self.rest[self.rest.index("[") :] if "[" in self.rest else self.rest
        words = json.loads(text)
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"{self.keyword} is not in exec form: {self.rest}")
        return words

    def sources(self) -> list[str]:
        """What a COPY takes, its destination and options left out."""
        words = [word for word in self.rest.split() if not word.startswith("--")]
        return words[:-1]


@dataclass(frozen=True, slots=True)
class Stage:
    """One build stage: its base image, its name (empty if none) and its instructions after FROM."""

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def of(self, keyword: str) -> list[Instruction]:
        return [instruction for instruction in self.instructions if instruction.keyword == keyword]


def read_dockerfile(path: Path) -> list[Stage]:
    """The stages in order. Raises ValueError where an instruction comes before the first FROM."""
    stages: list[Stage] = []
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        keyword, _, rest = line.strip().partition(" ")
        if not keyword:
            continue
        if keyword == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(base.strip(), name.strip()))
        elif not stages:
            raise ValueError(f"{keyword} before FROM")
        else:
            stages[-1].instructions.append(Instruction(keyword, " ".join(rest.split())))
    return stages
