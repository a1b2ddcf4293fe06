import os
import subprocess
import sys
import time

from tests.programs.bench.proc import cpu_s, family, forget_peak, peak_bytes, peak_mb


def test_cpu_of_a_process_is_what_it_measures_itself():
    begun, own = cpu_s([os.getpid()]), time.process_time()
    while time.process_time() - own < 0.05:
        pass
    assert 0.05 <= cpu_s([os.getpid()]) - begun < 5.0


def test_what_a_process_started_counts_with_it():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1); input()'])"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout.readline() == b"1\n"  # the child's, so it lives
        both = family(parent.pid)
        assert both[0] == parent.pid
        assert len(both) == 2
        assert cpu_s([parent.pid]) > cpu_s(both[1:]) > 0.0
        parent.communicate(b"\n")


def test_a_status_page_has_the_peak():
    assert peak_bytes("Name:\tx\nVmPeak:\t 9 kB\nVmHWM:\t   2 kB\nVmRSS:\t 1 kB\n") == 2048
    assert peak_bytes("Name:\tzombie\n") == 0


def test_a_peak_can_be_forgotten():
    code = "b = bytearray(b'x') * 50_000_000; del b; print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        before = peak_mb([child.pid])
        assert before > 50
        forget_peak([child.pid])
        assert peak_mb([child.pid]) < before - 40
        child.communicate(b"\n")
