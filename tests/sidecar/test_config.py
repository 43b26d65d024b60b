from pathlib import Path

import pytest

from sidecar.config import Config, from_environment

COLLECTORS = frozenset({"pod", "tcp"})


def test_an_empty_environment_gives_the_defaults() -> None:
    assert from_environment({}, collectors=COLLECTORS) == (Config(), [])


def test_every_variable_is_read() -> None:
    config, problems = from_environment(
        {
            "KITTY_PORT": "9101",
            "KITTY_BIND": "::1",
            "KITTY_NODE": "n1",
            "KITTY_POD": "p",
            "KITTY_NAMESPACE": "team-a",
            "KITTY_POD_UID": "u",
            "KITTY_POD_IP": "10.0.0.1",
            "KITTY_JOB": "llm, größer",
            "KITTY_RANK": "007",
            "KITTY_PROFILE": "unprivileged",
            "KITTY_COLLECTORS": "tcp, pod",
            "KITTY_RTT_HOOK": "tcp_probe",
            "KITTY_LIFECYCLE": "ordinary",
            "KITTY_RESTART_POLICY": "Never",
            "KITTY_PROC": "/host/proc",
            "KITTY_SYS": "/host/sys",
            "KITTY_BCC_PYTHON": "/opt/python",
        },
        collectors=COLLECTORS,
    )
    assert problems == []
    assert config == Config(
        port=9101,
        bind="::1",
        node="n1",
        pod="p",
        namespace="team-a",
        pod_uid="u",
        pod_ip="10.0.0.1",
        job="llm, größer",
        rank="7",
        profile="unprivileged",
        collectors=COLLECTORS,
        rtt_hook="tcp_probe",
        lifecycle="ordinary",
        restart_policy="Never",
        proc=Path("/host/proc"),
        sys=Path("/host/sys"),
        bcc_python="/opt/python",
    )


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("KITTY_PORT", "0", "1 to 65535"),
        ("KITTY_PORT", "https", "1 to 65535"),
        ("KITTY_PORT", "²", "1 to 65535"),
        ("KITTY_RANK", "-1", "non-negative integer"),
        ("KITTY_RANK", "12345678", "non-negative integer"),
        ("KITTY_JOB", "a\nb", "printable"),
        ("KITTY_JOB", "x" * 254, "printable"),
        ("KITTY_PROFILE", "root", "privileged, capabilities, unprivileged"),
        ("KITTY_COLLECTORS", "tcp,gups", "pod, tcp"),
        ("KITTY_RTT_HOOK", "kprobe", "tcp_probe"),
        ("KITTY_LIFECYCLE", "sidecar", "native, ordinary"),
        ("KITTY_RESTART_POLICY", "never", "Always, OnFailure, Never"),
        ("KITTY_PROC", "proc", "absolute path"),
        ("KITTY_BCC_PYTHON", "python3", "absolute path"),
    ],
)
def test_a_bad_value_is_named_and_its_default_used(name: str, value: str, allowed: str) -> None:
    config, (problem,) = from_environment({name: value}, collectors=COLLECTORS)
    assert config == Config()
    assert problem.startswith(f"{name}=")
    assert allowed in problem


def test_one_bad_value_leaves_the_others() -> None:
    config, problems = from_environment(
        {"KITTY_PORT": "x", "KITTY_NODE": "n1"}, collectors=COLLECTORS
    )
    assert (config.port, config.node, len(problems)) == (9100, "n1", 1)
