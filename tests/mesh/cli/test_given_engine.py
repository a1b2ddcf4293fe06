"""What `--engine` of `mesh up` takes, and what it says to the rest."""

import click
import pytest

from mesh.cli.up import given_engine
from mesh.demo.options import GivenEngine

URL, PAGE = "http://h:1", "http://m:2/metrics"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"us={URL}", GivenEngine("us", URL)),
        (f"us={URL},{PAGE}", GivenEngine("us", URL, PAGE)),
        (f"us={URL},http://m:2", GivenEngine("us", URL, PAGE)),
        (f"us={URL},metrics={PAGE}", GivenEngine("us", URL, PAGE)),
        (f"us={URL},batch-max=8", GivenEngine("us", URL, batch_max=8)),
        (f"us={URL},load-s=400", GivenEngine("us", URL, load_s=400.0)),
        (
            f"us={URL},{PAGE},model=org/a,batch-max=8,model=b",
            GivenEngine("us", URL, PAGE, 8, ("org/a", "b")),
        ),
        (f"us={URL},model=a=b,model=a=b", GivenEngine("us", URL, models=("a=b",))),
        ("us=http://h:1/a=b/", GivenEngine("us", "http://h:1/a=b")),
        (f"us={URL},http://m:2/a=b", GivenEngine("us", URL, "http://m:2/a=b")),
    ],
)
def test_what_it_takes(text, expected):
    assert given_engine(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("us", "write REGION=URL"),
        ("us=", "write REGION=URL"),
        (f"us={URL},", "write REGION=URL"),
        ("us=h:1", "http:// is missing before h:1"),
        (f"us={URL},m:2", "http:// is missing before m:2"),
        (f"us={URL},batch=8", "'batch=8' is not one of metrics, batch-max, load-s, model"),
        (f"us={URL},batch-max=8,{PAGE}", "is not one of"),
        (f"us={URL},batch-max=0", "from 1 to 65536"),
        (f"us={URL},load-s=0", "seconds from 1 to 3600"),
        (f"us={URL},load-s=3601", "seconds from 1 to 3600"),
        (f"us={URL},batch-max=-1", "from 1 to 65536"),
        (f"us={URL},batch-max=65537", "from 1 to 65536"),
        (f"us={URL},batch-max=", "from 1 to 65536"),
        (f"us={URL},batch-max=1,batch-max=2", "once each"),
        (f"us={URL},{PAGE},metrics={PAGE}", "once each"),
        (f"us={URL},model=", "a name of 1 to"),
        ("us=http://h:1/v1", "without /v1"),
        (f"us={URL},metrics=ftp://m", "http://host:port"),
    ],
)
def test_what_it_does_not_take(text, says):
    with pytest.raises(click.BadParameter, match=says):
        given_engine(text)
