"""AdmissionReview, version 1: what the API server asks and what it is answered.

https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import orjson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from webhook.patch import Operation

API_VERSION = "admission.k8s.io/v1"
MAX_WARNINGS = 16


class BadReviewError(Exception):
    """The request holds no AdmissionReview that could be answered; the text says why."""


class AdmissionResponse(TypedDict):
    """The answer to one request."""

    uid: str
    allowed: bool
    patchType: NotRequired[str]
    patch: NotRequired[str]
    warnings: NotRequired[list[str]]


class AdmissionReview(TypedDict):
    """The envelope of an answer."""

    apiVersion: str
    kind: str
    response: AdmissionResponse


@dataclass(frozen=True, kw_only=True)
class Request:
    """The parts of a request that a review needs.

    Attributes:
        uid: Names the request; it goes back with the answer.
        operation: ``CREATE`` and so on; empty where it is absent.
        subresource: Such as ``ephemeralcontainers``; empty for the object itself.
        kind: Kind of the object under review, as the object says, else as the request says.
        namespace: Of the request: controllers leave it out of the pod's metadata.
        name: Empty where the server is still to generate it.
        object: The object as raw JSON; None on DELETE.
    """

    uid: str
    operation: str
    subresource: str
    kind: str
    namespace: str
    name: str
    object: Any


def read(body: bytes) -> Request:
    """Reads the body of a request.

    Raises:
        BadReviewError: It is no JSON, nested too deep, or has no uid to answer to.
    """
    try:
        review = _decode(body)
    except RecursionError as error:
        raise BadReviewError("the body is nested too deep") from error
    except ValueError as error:
        raise BadReviewError("the body is not JSON") from error
    if not isinstance(review, dict) or review.get("kind") != "AdmissionReview":
        raise BadReviewError("the body is no AdmissionReview")
    if review.get("apiVersion") != API_VERSION:
        raise BadReviewError(f"the apiVersion is not {API_VERSION}")
    request = review.get("request")
    if not isinstance(request, dict):
        raise BadReviewError("the AdmissionReview has no request")
    uid = request.get("uid")
    if not isinstance(uid, str) or not uid:
        raise BadReviewError("the request has no uid")
    under_review = request.get("object")
    return Request(
        uid=uid,
        operation=_text(request, "operation"),
        subresource=_text(request, "subResource"),
        kind=_text(under_review, "kind") or _text(request.get("kind"), "kind"),
        namespace=_text(request, "namespace"),
        name=_text(request, "name"),
        object=under_review,
    )


def _decode(body: bytes) -> Any:
    """The body's JSON; what the fast reader refuses, as halves of surrogates, the other takes."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return json.loads(body)


def encode(value: Any) -> bytes:
    """The value as JSON, halves of surrogates included."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value).encode()


def _text(holder: Any, key: str) -> str:
    value = holder.get(key) if isinstance(holder, dict) else None
    return value if isinstance(value, str) else ""


def answer(
    uid: str, operations: Sequence[Operation] = (), warnings: Sequence[str] = ()
) -> AdmissionReview:
    """An answer that allows the object, with a patch where there are operations."""
    response = AdmissionResponse(uid=uid, allowed=True)
    if operations:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(encode(operations)).decode()
    if warnings:
        response["warnings"] = list(warnings[:MAX_WARNINGS])
    return AdmissionReview(apiVersion=API_VERSION, kind="AdmissionReview", response=response)
