"""Hypothesis' strategy of cases of a collective: what fails shrinks to few ranks, short vectors and plain codecs."""

from __future__ import annotations

from collective_cases import Case, draw_case
from hypothesis import strategies as st


@st.composite
def cases(draw: st.DrawFn, name: str) -> Case:
    return draw_case(lambda values: draw(st.sampled_from(values)), name)
