"""The bar of a price on a request's page: it has a part for all that the price adds up from."""

import re

import pytest

from mesh.core.policies.mesh_price import TERMS
from tests.support.pages import ROOT

PAGE = ROOT / "mesh/console/page"
[LISTED] = re.findall(r"const TERMS = \[(.*?)\]", (PAGE / "details.js").read_text(), re.DOTALL)
[NAMED] = re.findall(r"const NAMES = \{(.*?)\}", (PAGE / "details.js").read_text(), re.DOTALL)


@pytest.mark.parametrize("term", [*TERMS, "transfer_s", "decode_queue_s"])
def test_every_term_of_a_price_has_a_part_with_a_name_and_a_colour(term):
    assert f'"{term}"' in LISTED and re.search(rf"\b{term}: \"", NAMED)
    css = (PAGE / "console.css").read_text()
    assert re.search(rf"\.t-{term}\b[^{{]*\{{ background: var\(--c\d\)", css)
