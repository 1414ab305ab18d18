"""Certificates, tokens and hosts: which clients may connect over Flight."""

import contextlib
import dataclasses
import ipaddress
import os
import pathlib
import secrets
import stat
from typing import Any

from jasgd import workdir as workdirs

# Environment variable with the token, for clients that have no workdir.
TOKEN_VARIABLE = 'JASGD_TOKEN'


@dataclasses.dataclass(frozen=True)
class Tls:
  """Mutual TLS: both sides show a certificate. All files are PEM.

  Attributes:
    certificate: Path of this side's certificate, or chain of certificates. A
      server's certificate names the host to which clients connect.
    key: Path of the private key of that certificate.
    authority: Path of the certificate that signed the other side's certificate.
  """

  certificate: str | os.PathLike[str]
  key: str | os.PathLike[str]
  authority: str | os.PathLike[str]

  def make_server_options(self) -> dict[str, Any]:
    """Options of a Flight server."""
    certificate, key, authority = self._read()
    return {
      'tls_certificates': [(certificate, key)],
      'root_certificates': authority,
      'verify_client': True,
    }

  def make_client_options(self) -> dict[str, Any]:
    """Options of a Flight client."""
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
  """Value of the header `authorization`.

  Raises:
    ValueError: if the token cannot be sent in a header. It is not shown.
  """
  if not token or not all('!' <= letter <= '~' for letter in token):
    raise ValueError(
      'A token must have at least one character, and only visible ASCII '
      'characters.'
    )
  return f'Bearer {token}'.encode()


def is_loopback(host: str) -> bool:
  """Whether only this machine can connect to a host name or address."""
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == 'localhost'


def make_token(workdir: workdirs.Workdir) -> str:
  """The token of a run, which is made if there is none.

  Args:
    workdir: Folder of the run. Several processes may make it at once.

  Returns:
    The token in its file. A new one is that of the environment variable, or
    random.
  """
  if not workdir.token.exists():
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    part = workdir.token.with_name(f'token.{secrets.token_hex(4)}.part')
    with os.fdopen(os.open(part, flags, 0o600), 'w') as file:
      file.write(os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(32))
    with contextlib.suppress(FileExistsError):  # Another process was faster.
      os.link(part, workdir.token)
    part.unlink()
  token = find_token(workdir)
  assert token is not None  # It was written just now.
  return token


def find_token(workdir: workdirs.Workdir | None) -> str | None:
  """The token of a run; None if there is none.

  Raises:
    WorkdirError: if other users could read its file.
  """
  if workdir is None or not workdir.token.exists():
    return os.environ.get(TOKEN_VARIABLE)
  mode = workdir.token.stat().st_mode
  if mode & (stat.S_IRWXG | stat.S_IRWXO):
    raise workdirs.WorkdirError(
      f'{os.fspath(workdir.token)!r} must be readable by its owner only (mode '
      f'0600), got mode {stat.S_IMODE(mode):04o}.'
    )
  return workdir.token.read_text().strip()
