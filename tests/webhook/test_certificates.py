"""The webhook's own authority through the years, by a clock that the test turns."""

from __future__ import annotations

import datetime as dt
import ssl
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from cryptography import x509

from webhook.certificates import (
    CA_LIFETIME,
    LEAF_LIFETIME,
    SETTLE,
    Material,
    UnusableError,
    expiry,
    from_secret,
    renewed,
    service_names,
    to_secret,
)

if TYPE_CHECKING:
    from pathlib import Path

NAMES = service_names("kitty-webhook", "kitty-system")
START = dt.datetime.now(dt.UTC)
DAY = dt.timedelta(days=1)


def authorities(material: Material) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(material.bundle)


def signed_by(material: Material, authority: x509.Certificate) -> bool:
    leaf = x509.load_pem_x509_certificate(material.certificate)
    return leaf.issuer == authority.subject


def test_a_handshake_as_the_api_server_makes_it(tmp_path: Path) -> None:
    """Verified by OpenSSL: the name with .svc, the CA from the bundle, nothing else trusted."""
    material = renewed(None, NAMES, START)
    pem = tmp_path / "tls.pem"
    pem.write_bytes(material.certificate + material.key)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(pem)
    asking = ssl.create_default_context(cadata=material.bundle.decode())
    asking.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = asking.wrap_bio(to_client, to_server, server_hostname=NAMES[0])
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    assert client.getpeercert()
    assert NAMES[0] == "kitty-webhook.kitty-system.svc"


def test_nothing_is_made_anew_before_its_time() -> None:
    material = renewed(None, NAMES, START)
    assert renewed(material, NAMES, START + LEAF_LIFETIME / 2) is material


def test_the_certificate_is_renewed_when_a_third_of_its_life_is_left() -> None:
    material = renewed(None, NAMES, START)
    later = START + LEAF_LIFETIME * 0.7
    new = renewed(material, NAMES, later)
    assert new.bundle == material.bundle
    assert new.ca_key == material.ca_key
    assert new.certificate != material.certificate
    assert expiry(new.certificate) > later + LEAF_LIFETIME * 0.9


def test_a_new_authority_is_trusted_before_it_signs_and_the_old_one_after() -> None:
    material = renewed(None, NAMES, START)
    old = authorities(material)[0]
    late = START + CA_LIFETIME * 0.7
    material = renewed(material, NAMES, late - DAY * 40)
    first = renewed(material, NAMES, late)
    new = authorities(first)[0]
    assert authorities(first) == [new, old]
    assert signed_by(first, old)
    assert renewed(first, NAMES, late + SETTLE / 2) is first
    second = renewed(first, NAMES, late + SETTLE)
    assert signed_by(second, new)
    assert authorities(second) == [new, old]


def test_an_expired_authority_leaves_the_bundle() -> None:
    material = renewed(None, NAMES, START)
    old = authorities(material)[0]
    ages = renewed(material, NAMES, START + CA_LIFETIME + DAY)
    assert old not in authorities(ages)
    assert signed_by(ages, authorities(ages)[0])  # an expired certificate cannot wait


def test_an_expired_certificate_does_not_wait_for_its_new_authority_to_settle() -> None:
    """After a long sleep the authority is due and still valid, and the certificate is not."""
    awake = START + CA_LIFETIME * 0.7
    material = renewed(renewed(None, NAMES, START), NAMES, awake)
    assert len(authorities(material)) == 2
    assert expiry(material.certificate) > awake


def test_another_service_name_needs_another_certificate_at_once() -> None:
    material = renewed(None, NAMES, START)
    assert renewed(material, service_names("other", "kitty-system"), START) is not material


def test_a_secret_holds_it_and_gives_it_back() -> None:
    material = renewed(None, NAMES, START)
    assert from_secret(to_secret(material)) == material
    assert from_secret(None) is None
    assert from_secret({}) is None


@pytest.mark.parametrize("data", [{"tls.crt": "eA=="}, {"ca.crt": 1}, {"ca.crt": "%"}])
def test_a_secret_that_holds_something_else_is_unusable(data: dict[str, str]) -> None:
    with pytest.raises(UnusableError):
        from_secret(data)


def test_keys_of_another_certificate_are_unusable() -> None:
    one, other = renewed(None, NAMES, START), renewed(None, NAMES, START)
    for mixed in (replace(one, key=other.key), replace(one, ca_key=other.ca_key)):
        with pytest.raises(UnusableError):
            renewed(mixed, NAMES, START)
    with pytest.raises(UnusableError):
        renewed(replace(one, certificate=b"no PEM"), NAMES, START)


def test_a_certificate_of_an_unknown_authority_is_replaced() -> None:
    one, other = renewed(None, NAMES, START), renewed(None, NAMES, START + DAY)
    mixed = replace(one, certificate=other.certificate, key=other.key)
    assert signed_by(renewed(mixed, NAMES, START), authorities(one)[0])
