"""The webhook's own certificate authority: what it holds, and when each part is made anew.

Pure: material and time go in, material comes out. Who stores it and who serves it is elsewhere.
"""

from __future__ import annotations

import binascii
import datetime as dt
from base64 import b64decode, b64encode
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CA_LIFETIME = dt.timedelta(days=1095)
LEAF_LIFETIME = dt.timedelta(days=90)
SETTLE = dt.timedelta(minutes=10)
"""How long a new CA is only trusted before it signs: every replica and the API server have the
new bundle by then, so no connection meets a certificate whose CA it does not know."""
_SKEW = dt.timedelta(hours=1)


class UnusableError(Exception):
    """Stored material that is incomplete, unreadable or does not fit together."""


@dataclass(frozen=True)
class Material:
    """A CA and the certificate it signed, all PEM.

    Attributes:
        bundle: The current CA first, then previous ones that are still valid.
        ca_key: The current CA's private key.
        certificate: The serving certificate, by the current CA or the one before.
        key: Its private key.
    """

    bundle: bytes
    ca_key: bytes
    certificate: bytes
    key: bytes


_KEYS = {"bundle": "ca.crt", "ca_key": "ca.key", "certificate": "tls.crt", "key": "tls.key"}


def from_secret(data: Mapping[str, Any] | None) -> Material | None:
    """The material that a Secret's ``data`` holds; None where it holds none yet.

    Raises:
        UnusableError: It holds something else.
    """
    if not data:
        return None
    try:
        parts = {part: b64decode(data[key], validate=True) for part, key in _KEYS.items()}
    except (KeyError, TypeError, binascii.Error) as error:
        raise UnusableError(f"the secret's data is incomplete: {error!r}") from error
    return Material(**parts)


def to_secret(material: Material) -> dict[str, str]:
    """The ``data`` of a Secret that holds the material."""
    return {key: b64encode(getattr(material, part)).decode() for part, key in _KEYS.items()}


def service_names(service: str, namespace: str) -> tuple[str, ...]:
    """The DNS names of a Service; the API server uses the one that ends in ``.svc``."""
    host = f"{service}.{namespace}.svc"
    return (host, f"{service}.{namespace}", f"{host}.cluster.local")


def expiry(pem: bytes) -> dt.datetime:
    """When the first certificate of a PEM file expires.

    Raises:
        ValueError: It holds none.
    """
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc


def trusts(bundle: bytes, certificate: bytes) -> bool:
    """Whether a PEM bundle holds the CA that signed the first certificate of a PEM file.

    Raises:
        ValueError: One of the two cannot be read.
    """
    leaf = x509.load_pem_x509_certificate(certificate)
    return any(_signed(leaf, ca) for ca in x509.load_pem_x509_certificates(bundle))


def renewed(material: Material | None, names: Sequence[str], now: dt.datetime) -> Material:
    """The material as it should be now: the same object where nothing is due.

    A certificate is due when a third of its lifetime is left. A new CA joins the bundle at once
    and signs only after SETTLE; the previous one stays in the bundle until it expires.

    Args:
        material: What is stored; None for a first time.
        names: DNS names that the certificate must carry.
        now: The time, with its zone.

    Raises:
        UnusableError: What is stored cannot be read.
    """
    if material is None:
        return _first(names, now, previous=[])
    try:
        authorities = x509.load_pem_x509_certificates(material.bundle)
        leaf = x509.load_pem_x509_certificate(material.certificate)
        _check_key(leaf, material.key)
        _check_key(authorities[0], material.ca_key)
    except (ValueError, TypeError, IndexError, UnsupportedAlgorithm) as error:
        raise UnusableError(f"the secret's certificates cannot be read: {error}") from error
    if _due(authorities[0], now):
        valid = [ca for ca in authorities if ca.not_valid_after_utc > now]
        authority, key = _authority(now)
        material = replace(material, bundle=_pem(authority, *valid), ca_key=_key_pem(key))
        authorities = [authority, *valid]
    if _leaf_due(leaf, authorities, names, now):
        return _with_leaf(material, authorities[0], names, now)
    return material


def _first(names: Sequence[str], now: dt.datetime, previous: list[x509.Certificate]) -> Material:
    authority, key = _authority(now)
    bundle = _pem(authority, *previous)
    empty = Material(bundle=bundle, ca_key=_key_pem(key), certificate=b"", key=b"")
    return _with_leaf(empty, authority, names, now)


def _leaf_due(
    leaf: x509.Certificate,
    authorities: Sequence[x509.Certificate],
    names: Sequence[str],
    now: dt.datetime,
) -> bool:
    current = authorities[0]
    trusted = any(_signed(leaf, authority) for authority in authorities)
    if not trusted or leaf.not_valid_after_utc <= now or _dns_names(leaf) != set(names):
        return True
    settled = now - current.not_valid_before_utc - _SKEW >= SETTLE
    return settled and (_due(leaf, now) or not _signed(leaf, current))


def _due(certificate: x509.Certificate, now: dt.datetime) -> bool:
    lifetime = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return certificate.not_valid_after_utc - now <= lifetime / 3


def _signed(leaf: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        leaf.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _dns_names(leaf: x509.Certificate) -> set[str]:
    try:
        extension = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return set()
    return set(extension.value.get_values_for_type(x509.DNSName))


def _check_key(certificate: x509.Certificate, pem: bytes) -> None:
    key = serialization.load_pem_private_key(pem, password=None)
    if key.public_key() != certificate.public_key():
        raise ValueError("a private key belongs to another certificate")


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _authority(now: dt.datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    # The date in the name tells a successor from its predecessor, whose names must differ for
    # a verifier to find the right one of a bundle.
    name = _name(f"kitty webhook CA {now:%Y-%m-%dT%H:%M:%SZ}")
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(name, name, key.public_key(), now, CA_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate, key


def _with_leaf(
    material: Material, authority: x509.Certificate, names: Sequence[str], now: dt.datetime
) -> Material:
    ca_key = serialization.load_pem_private_key(material.ca_key, password=None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    san = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
    aki = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    certificate = (
        _builder(_name(names[0][:64]), authority.subject, key.public_key(), now, LEAF_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(san, critical=False)
        .add_extension(aki, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    return replace(material, certificate=_pem(certificate), key=_key_pem(key))


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    now: dt.datetime,
    lifetime: dt.timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + lifetime)
    )


def _pem(*certificates: x509.Certificate) -> bytes:
    return b"".join(c.public_bytes(serialization.Encoding.PEM) for c in certificates)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
