"""One conversion of each case per session, whoever asks for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.families.cases import CASES
from tests.families.subject import Subject


@pytest.fixture(scope="session")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    made: dict[str, Subject] = {}

    def of(name: str) -> Subject:
        if name not in made:
            made[name] = Subject(CASES[name], tmp_path_factory.mktemp(name))
        return made[name]

    return of


@pytest.fixture(params=CASES)
def subject(request: pytest.FixtureRequest, subject_of: Callable[[str], Subject]) -> Subject:
    return subject_of(request.param)
