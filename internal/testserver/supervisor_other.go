//go:build !linux

package testserver

import (
	"os"
	"os/exec"
	"syscall"
)

func supervised(string, *owner, []string) (*exec.Cmd, error) { return nil, errMissing }

// Terminate asks a process to end.
func Terminate(pid int) {
	if p, err := os.FindProcess(pid); err == nil {
		_ = p.Signal(syscall.SIGTERM)
	}
}
