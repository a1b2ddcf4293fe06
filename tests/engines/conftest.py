"""What tests of engines need before they are imported."""

import pytest

pytest.register_assert_rewrite("tests.engines.contract", "tests.engines.without_page_contract")
