# Shell functions for tests inside another root file system; sourced, not run. They need root.
# shellcheck shell=bash

# attach ROOT: mounts what programs in it need, and lets it resolve names; detach ROOT: undoes that.
attach() {
  local folder
  for folder in /proc /dev /dev/shm /tmp; do
    mkdir -p "$1$folder"
    case $folder in
      /proc) mount -t proc proc "$1$folder" ;;
      /dev) mount --bind /dev "$1$folder" ;;
      *) mount -t tmpfs tmpfs "$1$folder" ;;
    esac
  done
  cp -L /etc/resolv.conf "$1/etc/resolv.conf"
  # An installer writes it, and so does what runs containers.
  if [[ ! -e $1/etc/hosts ]]; then echo '127.0.0.1 localhost' >"$1/etc/hosts"; fi
}
detach() {
  local folder
  for folder in /tmp /dev/shm /dev /proc; do if mountpoint -q "$1$folder"; then umount -l "$1$folder"; fi; done
}

# chroot_environment ROOT: prints the variables that programs in it run with, a line each: the proxies, and SSL_CERT_FILE's certificates if it
# is set, which are copied into ROOT.
chroot_environment() {
  local name
  printf '%s\n' HOME=/root LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
  for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY CI; do
    if [[ -n ${!name:-} ]]; then printf '%s\n' "$name=${!name}"; fi
  done
  if [[ -n ${SSL_CERT_FILE:-} ]]; then
    cp -L "$SSL_CERT_FILE" "$1/root/certificates.pem"
    printf '%s\n' SSL_CERT_FILE=/root/certificates.pem PIP_CERT=/root/certificates.pem
  fi
}
