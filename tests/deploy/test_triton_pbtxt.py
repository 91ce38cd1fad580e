"""The text-format reader compared with that of protobuf, and with malformed text."""

from __future__ import annotations

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2

from stoker.base.errors import ConfigError
from stoker.deploy.syntax import pbtxt
from stoker.deploy.syntax.pbtxt import Message, Scalar, Word


def shape(message: Message) -> list:
    return [(f.name, f.value.text if isinstance(f.value, Scalar) else shape(f.value)) for f in message.fields]


def test_lists_equal_repeated_fields():
    listed = pbtxt.parse('input [ { name: "a" dims: [ -1, 2 ] }, { name: "b" } ]')
    repeated = pbtxt.parse('input { name: "a" dims: -1 dims: 2 } input { name: "b" }')
    assert shape(listed) == shape(repeated) == [("input", [("name", "a"), ("dims", "-1"), ("dims", "2")]), ("input", [("name", "b")])]


def test_stray_commas_comments_and_placeholders():
    text = """
    # a comment
    max_batch_size: ${triton_max_batch_size}, ;
    output [ , { name: "x", } , , { name: 'y' data_type: TYPE_${kind} } , ],
    model_transaction_policy { decoupled: ${decoupled mode} },
    """
    message = pbtxt.parse(text)
    assert message.scalar("max_batch_size").unfilled == ["triton_max_batch_size"]
    assert [m.scalar("name").text for m in message.messages("output")] == ["x", "y"]
    assert message.messages("output")[1].scalar("data_type").unfilled == ["kind"]
    assert message.message("model_transaction_policy").scalar("decoupled").text == "${decoupled mode}"


def test_line_numbers():
    message = pbtxt.parse('a: 1\n# c\nb {\n  c: "x"\n  d: [ 1,\n 2 ]\n}')
    assert [(f.name, f.line) for f in message.walk()] == [("a", 1), ("b", 3), ("c", 4), ("d", 5), ("d", 5)]
    assert [s.line for s in message.message("b").scalars("d")] == [5, 6]


def test_strings_join_and_unescape():
    message = pbtxt.parse(r'''a: "one" 'two' b: "\"\\\n\t\x41\101é"''')
    assert message.scalar("a").text == "onetwo"
    assert message.scalar("b").text == '"\\\n\tAAé'


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("a: 1\nb", 2, "b has no value"),
        ("a 3", 1, "a has no value"),
        ("a:\n\n", 3, "a has no value"),
        ("a {\n b: 1", 2, "is not closed"),
        ("a: [1,\n2", 2, "is not closed"),
        ("}", 1, "'}' is in the place"),
        ("a { ] }", 1, "']' is in the place"),
        ('a: 1\nb: "open\nc: 2', 2, "does not end"),
        ("a: [[1]]", 1, "is not a value"),
        ("a: <b: 1}", 1, "'}' is in the place"),
    ],
)
def test_errors_name_the_line(text, line, part):
    with pytest.raises(ConfigError, match=f"^file:{line}: .*{part}"):
        pbtxt.parse(text, "file")


def test_hostile_sizes(tmp_path):
    with pytest.raises(ConfigError, match="nested more than 32 deep"):
        pbtxt.parse("a {" * 100_000)
    with pytest.raises(ConfigError, match="nested more than 32 deep"):
        pbtxt.parse("a <" * 100_000)
    with pytest.raises(ConfigError, match="more than 1048576"):
        pbtxt.parse("#" * (pbtxt.MAX_BYTES + 1))
    file = tmp_path / "config.pbtxt"
    file.write_bytes(b"a: 1\n\xff")
    with pytest.raises(ConfigError, match=r"config.pbtxt:2: .*UTF-8"):
        pbtxt.read_message(file)
    with open(file, "wb") as out:
        out.truncate(1 << 40)
    with pytest.raises(ConfigError, match="1099511627776 bytes"):
        pbtxt.read_message(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        pbtxt.read_message(tmp_path)


@given(st.text(alphabet="a:{}[]<>,;\"'\\$#\n 1-é", max_size=60))
def test_any_text_parses_or_is_refused(text):
    try:
        message = pbtxt.parse(text, "f")
    except ConfigError as error:
        assert str(error).startswith("f:")
    else:
        assert all(field.line >= 1 for field in message.walk())


@given(st.text(alphabet='ab"\\\n\t${}é#,', max_size=30), st.lists(st.integers(-1, 9), max_size=3), st.booleans())
def test_formatted_text_is_read_by_protobuf(name, dims, optional):
    data = {"name": name, "input": [{"name": name, "data_type": Word("TYPE_INT32"), "dims": dims, "optional": optional}]}
    text = pbtxt.format_message(data)
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert config.name == config.input[0].name == name
    assert list(config.input[0].dims) == dims
    assert config.input[0].optional is optional
    ours = pbtxt.parse(text)
    assert ours.scalar("name").text == name
    assert [int(s.text) for s in ours.message("input").scalars("dims")] == dims
