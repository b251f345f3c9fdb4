package main

import (
	"bufio"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestExecuteReturnsTheStatusOfTheCommand(t *testing.T) {
	t.Parallel()
	for command, want := range map[string]int{"true": 0, "exit 7": 7, "kill -9 $$": 1} {
		if got := execute(t.Context(), []string{"sh", "-c", command}); got != want {
			t.Errorf("%s: %d, want %d", command, got, want)
		}
	}
	if got := execute(t.Context(), []string{"/does/not/exist"}); got != 1 {
		t.Errorf("no such command: %d, want 1", got)
	}
}

func TestSignalsReachWhatTheCommandStarted(t *testing.T) {
	t.Parallel()
	started := filepath.Join(t.TempDir(), "started")
	if err := syscall.Mkfifo(started, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	status := make(chan int)
	go func() {
		// The inner shell holds the pipe open as long as it lives.
		status <- execute(ctx, []string{"sh", "-c", "sh -c 'echo $$; sleep 1000; true' >" + started + " & wait; true"})
	}()
	pipe, err := os.Open(started)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = pipe.Close() }()
	lines := bufio.NewReader(pipe)
	if line, err := lines.ReadString('\n'); err != nil || strings.TrimSpace(line) == "" {
		t.Fatal(line, err)
	}
	cancel()
	if got := <-status; got == 0 {
		t.Error("status 0 of an interrupted command")
	}
	ended := make(chan error)
	go func() {
		_, err := io.Copy(io.Discard, lines)
		ended <- err
	}()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("what the command started is still there")
	}
}
