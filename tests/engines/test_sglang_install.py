from tests.engines.sglang_install import wanted


def test_what_computes_on_gpus_alone_is_left_out():
    named = ["torch==2.14.1", "torchaudio==2.11.0", "sglang-kernel==0.4.10", "flashinfer_python"]
    named += ["nvidia-ml-py", "nvidia-cutlass-dsl[cu13]==4.8.0", "sgl-deep-gemm", "av==16.1.0"]
    assert wanted(named) == ["torch==2.14.1", "nvidia-ml-py"]


def test_what_holds_elsewhere_and_extras_are_left_out():
    named = ['tomli; python_version < "3"', 'pytest; extra == "test"', 'tqdm; python_version > "3"']
    assert wanted(named) == ["tqdm"]
