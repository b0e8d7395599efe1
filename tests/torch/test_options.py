"""Options of the backend "qccl": arguments, environment variables, and their errors."""

from __future__ import annotations

import re

import pytest

from qccl.errors import ArgumentError, CodecError
from qccl.torch import Options


@pytest.mark.parametrize("name", ["QCCL_CODEC", "QCCL_ALL_GATHER_CODEC"])
def test_an_error_of_a_variables_codec_names_the_variable(name, monkeypatch):
    for wrong, kind, text in (("onebit+ef", ArgumentError, "keeps its residual"), ("minmx8", CodecError, "minmax")):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(kind, match=f"^{name}='{re.escape(wrong)}'.*{text}"):
            Options()
        given = Options(codec="minmax4", all_gather_codec="none")  # its options win over the variables
        assert (given.codec, given.all_gather_codec) == ("minmax4", "none")
    with pytest.raises(ArgumentError, match=r"^codec='minmax4\+ef' keeps its residual"):
        Options(codec="minmax4+ef", all_gather_codec="none")
