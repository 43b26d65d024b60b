"""A cheap look at the webhook configuration's caBundles, between two runs of the upkeep.

A run takes a second of processor time and is a minute away; who blanks a caBundle turns injection
off at once. This asks for one object over a connection that stays open, with the standard library.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl

from webhook.cluster import WEBHOOKS
from webhook.container import ACCOUNT_PATH

EVERY = 5.0
"""Seconds between two looks."""
_LIMIT = 5.0


class Glance:
    """Looks at one MutatingWebhookConfiguration as the pod's own account.

    Args:
        name: Of the configuration.
        host: Of the API server.
        port: Of the API server.
        account: The folder of the account's token and CA.
    """

    def __init__(self, *, name: str, host: str, port: int, account: str = ACCOUNT_PATH) -> None:
        self._path = f"{WEBHOOKS}/{name}"
        self._address = host, port
        self._account = account
        self._connection: http.client.HTTPSConnection | None = None

    def bundles(self) -> tuple[str, ...] | None:
        """The caBundle of every entry, empty where there is none; None where it cannot be seen."""
        try:
            # The kubelet renews the token in its file.
            with open(f"{self._account}/token", encoding="ascii") as file:
                headers = {"Authorization": f"Bearer {file.read().strip()}"}
            if self._connection is None:
                context = ssl.create_default_context(cafile=f"{self._account}/ca.crt")
                self._connection = http.client.HTTPSConnection(
                    *self._address, timeout=_LIMIT, context=context
                )
            self._connection.request("GET", self._path, headers=headers)
            response = self._connection.getresponse()
            body = response.read()
            if response.status != http.HTTPStatus.OK:
                return None
            entries = json.loads(body).get("webhooks") or []
            return tuple(str(entry["clientConfig"].get("caBundle") or "") for entry in entries)
        except (OSError, ValueError, LookupError, AttributeError, http.client.HTTPException):
            self.close()
            return None

    def close(self) -> None:
        """Closes the connection; the next look opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def in_pod(name: str) -> Glance | None:
    """A look as the pod that this is; None outside of one."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    return Glance(name=name, host=host, port=int(port)) if host and port.isdigit() else None
