"""What is wrong with a value, in words for the person who gave it."""

from typing import Annotated, Any

import pytest
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from schemas.problems import what_it_must_be, what_it_must_be_instead

Finite = Annotated[float, Field(gt=0.5, allow_inf_nan=False)]


def own_words(value: int) -> int:
    raise ValueError(f"{value} is odd: give an even one")


@pytest.mark.parametrize(
    ("kind", "given", "words", "instead"),
    [
        (Finite, "-1", "must be more than 0.5", ", not -1"),
        (Finite, "nan", "must be a finite number", ", not nan"),
        (Finite, "soon", "must be a number", ", not soon"),
        (Finite, None, "must be a number", ", not None"),
        (Annotated[int, Field(ge=1)], "0", "must be at least 1", ", not 0"),
        (Annotated[int, Field(le=10**6)], "1e7", "must be a whole number", ", not 1e7"),
        (Annotated[int, Field(le=10**6)], 10**7, "must be at most 1000000", ", not 10000000"),
        (Annotated[float, Field(lt=1)], 1.5, "must be less than 1", ", not 1.5"),
        (int, "1.5", "must be a whole number", ", not 1.5"),
        (int, 1.5, "must be a whole number", ", not 1.5"),
        (int, "9" * 5000, "must be a whole number", f", not {'9' * 60}"),
        (bool, "perhaps", "must be true or false", ", not perhaps"),
        (str, 1, "must be a text", ", not 1"),
        (Annotated[tuple[int, ...], Field(min_length=1)], [], "must have at least 1", ""),
        (Annotated[str, Field(max_length=2)], "abc", "must have at most 2 character(s)", ""),
        (dict[str, int], 1, "must be a valid dictionary", ""),
        (Annotated[int, AfterValidator(own_words)], 3, "3 is odd: give an even one", ""),
    ],
)
def test_each_text_names_what_it_must_be(
    kind: Any, given: object, words: str, instead: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(kind).validate_python(given)
    [details] = caught.value.errors()
    assert what_it_must_be(details) == words
    assert what_it_must_be_instead(details) == words + instead
