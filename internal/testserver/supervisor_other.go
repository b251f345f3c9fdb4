//go:build !linux

package testserver

import "os/exec"

func supervised(string, *owner, []string) (*exec.Cmd, error) { return nil, errMissing }
