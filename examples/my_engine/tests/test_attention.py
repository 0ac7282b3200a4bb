import conformance


def test_attention_backend() -> None:
    conformance.check("my_engine.attention:MyBackend")
