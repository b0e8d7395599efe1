"""Options of the backend "qccl": arguments, environment variables, and their errors."""

from __future__ import annotations

import re

import pytest

from qccl.base.errors import ArgumentError, CodecError
from qccl.torch import Options, process_group


def test_an_error_of_a_variables_codec_names_the_variable(monkeypatch):
    for wrong, kind, text in (("onebit+ef", ArgumentError, "keeps its residual"), ("minmx8", CodecError, "minmax")):
        monkeypatch.setenv("QCCL_CODEC", wrong)
        with pytest.raises(kind, match=f"^QCCL_CODEC='{re.escape(wrong)}'.*{text}"):
            Options()
        given = Options(codec="minmax4", all_gather_codec="none")  # its options win over the variables
        assert (given.codec, given.all_gather_codec) == ("minmax4", "none")
    with pytest.raises(ArgumentError, match=r"^codec='minmax4\+ef' keeps its residual"):
        Options(codec="minmax4+ef", all_gather_codec="none")


def test_a_variable_that_is_gone(monkeypatch):
    monkeypatch.setenv("QCCL_ALL_GATHER_CODEC", "minmax8")
    with pytest.raises(ArgumentError, match=r"no such variable any more.*Options\(all_gather_codec="):
        process_group._create(None, None)
