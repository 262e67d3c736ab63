"""Interrupts from the keyboard while the main thread waits in a place where Python hears of none, as in Gloo."""

import signal
import socket
import threading

__all__ = ["Interrupts"]


class Interrupts:
    """Tells another thread of them: of those that become a KeyboardInterrupt, between `begin` and `end`."""

    def __init__(self) -> None:
        self.ear, self.mouth = socket.socketpair()
        for end in (self.ear, self.mouth):
            end.setblocking(False)
        self.listens = False

    def begin(self) -> None:
        """The main thread may wait from now on; on another thread, or where the program has its own way, nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        other = signal.set_wakeup_fd(self.mouth.fileno(), warn_on_full_buffer=False)
        if other != -1:  # somebody listens already, as an event loop does
            signal.set_wakeup_fd(other)
            return
        self.listens = True
        self.heard()  # what came before

    def end(self) -> None:
        if self.listens:
            signal.set_wakeup_fd(-1)
            self.listens = False

    def heard(self) -> bool:
        """Whether there was one since the last question."""
        try:
            return self.listens and signal.SIGINT in self.ear.recv(1024)
        except BlockingIOError:
            return False

    def close(self) -> None:
        self.ear.close()
        self.mouth.close()
