"""Certificates, tokens and hosts: who may come over Flight."""

import dataclasses
import ipaddress
import os
import pathlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class Tls:
  """Mutual TLS: both sides show a certificate. All files are PEM.

  Attributes:
    certificate: Path of one's own certificate, or chain of certificates. A
      server's names the host that clients connect to.
    key: Path of its private key.
    authority: Path of the certificate that the other side's is signed with.
  """

  certificate: str | os.PathLike[str]
  key: str | os.PathLike[str]
  authority: str | os.PathLike[str]

  def make_server_options(self) -> dict[str, Any]:
    """What a Flight server takes."""
    certificate, key, authority = self._read()
    return {
      'tls_certificates': [(certificate, key)],
      'root_certificates': authority,
      'verify_client': True,
    }

  def make_client_options(self) -> dict[str, Any]:
    """What a Flight client takes."""
    certificate, key, authority = self._read()
    return {
      'cert_chain': certificate,
      'private_key': key,
      'tls_root_certs': authority,
    }

  def _read(self) -> list[bytes]:
    paths = self.certificate, self.key, self.authority
    return [pathlib.Path(path).read_bytes() for path in paths]


def make_bearer(token: str) -> bytes:
  """The value of the header `authorization`.

  Raises:
    ValueError: if the token can not travel in a header. It is not shown.
  """
  if not token or not all('!' <= letter <= '~' for letter in token):
    raise ValueError(
      'A token must have at least one letter, and only visible letters of '
      'ASCII.'
    )
  return f'Bearer {token}'.encode()


def is_loopback(host: str) -> bool:
  """Whether only this machine can connect to a host's name or address."""
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == 'localhost'
