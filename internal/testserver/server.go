// Package testserver starts throwaway servers for tests from the binaries that are installed: each in a folder and on
// ports of its own, as an unprivileged user if the test runs as root. They can be killed and started again. They end with
// the process that started them, even if that is killed.
package testserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// stopFast shuts PostgreSQL down without waiting for clients.
const stopFast = syscall.SIGINT

// startTimeout bounds how long a server may take until it answers.
const startTimeout = 90 * time.Second

// Server is a throwaway server. Its methods are for one goroutine at a time.
type Server struct {
	// DSN is how clients reach it.
	DSN string

	// Port is its port on 127.0.0.1.
	Port int

	name    string
	dir     string
	owner   *syscall.Credential
	env     []string
	command []string
	helper  []string // a process that it needs beside it
	stop    syscall.Signal
	ready   func(ctx context.Context) error
	running []*process
}

// process is a child in a process group of its own.
type process struct {
	cmd   *exec.Cmd
	ended chan struct{}
}

// errMissing means that a server is not installed.
var errMissing = errors.New("not installed")

// IsMissing reports whether err says that a server is not installed.
func IsMissing(err error) bool { return errors.Is(err, errMissing) }

// newServer makes the server's folder, and gives it to the first of the users that exists.
func newServer(name string, users ...string) (*Server, error) {
	dir, err := os.MkdirTemp("", "inbox-"+name+"-")
	if err != nil {
		return nil, err
	}
	s := &Server{name: name, dir: dir, stop: syscall.SIGTERM}
	if os.Getuid() != 0 {
		return s, nil
	}
	for _, candidate := range append(users, "nobody") {
		account, err := user.Lookup(candidate)
		if err != nil {
			continue
		}
		uid, _ := strconv.ParseUint(account.Uid, 10, 32)
		gid, _ := strconv.ParseUint(account.Gid, 10, 32)
		s.owner = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
		return s, os.Chown(dir, int(uid), int(gid))
	}
	return nil, fmt.Errorf("%s: no unprivileged user to run it as", name)
}

// path returns a path in the server's folder.
func (s *Server) path(elem ...string) string {
	return filepath.Join(append([]string{s.dir}, elem...)...)
}

// LogPath is where the server's output goes.
func (s *Server) LogPath() string { return s.path("output.log") }

// write writes a file that the server can read.
func (s *Server) write(name, content string) (string, error) {
	path := s.path(name)
	return path, os.WriteFile(path, []byte(content), 0o644) //nolint:gosec // nothing secret
}

// run runs a command to its end.
func (s *Server) run(command ...string) error {
	p, err := s.spawn(command)
	if err != nil {
		return err
	}
	<-p.ended
	if !p.cmd.ProcessState.Success() {
		return fmt.Errorf("%s: %s: %s\n%s", s.name, strings.Join(command, " "), p.cmd.ProcessState, s.tail())
	}
	return nil
}

// Start starts the server and waits until it answers.
func (s *Server) Start() error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	for _, command := range [][]string{s.helper, s.command} {
		if command == nil {
			continue
		}
		p, err := s.spawn(command)
		if err != nil {
			return err
		}
		s.running = append(s.running, p)
	}
	server := s.running[len(s.running)-1]
	for {
		err := s.ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-server.ended:
			s.Kill()
			return fmt.Errorf("%s ended at its start: %s\n%s", s.name, server.cmd.ProcessState, s.tail())
		case <-ctx.Done():
			s.Kill()
			return fmt.Errorf("%s does not answer: %w\n%s", s.name, err, s.tail())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// Kill ends the server at once, with SIGKILL. It can be started again.
func (s *Server) Kill() {
	for _, p := range s.running {
		_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
		<-p.ended
	}
	s.running = nil
}

// Stop shuts the server down. It can be started again.
func (s *Server) Stop() {
	if len(s.running) == 0 {
		return
	}
	server := s.running[len(s.running)-1]
	_ = syscall.Kill(server.cmd.Process.Pid, s.stop)
	select {
	case <-server.ended:
	case <-time.After(20 * time.Second):
	}
	s.Kill()
}

// Remove ends the server and deletes its folder.
func (s *Server) Remove() {
	s.Kill()
	_ = os.RemoveAll(s.dir)
}

func (s *Server) tail() string {
	output, _ := os.ReadFile(s.LogPath())
	return string(output[max(0, len(output)-4000):])
}

func (s *Server) spawn(command []string) (*process, error) {
	log, err := os.OpenFile(s.LogPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644) //nolint:gosec // nothing secret
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }()
	cmd := exec.Command(command[0], command[1:]...) //nolint:gosec,noctx // commands of this package; ended by Kill
	cmd.Dir = s.dir
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(variable string) bool {
		return strings.HasPrefix(variable, "PG") || strings.HasPrefix(variable, "RABBITMQ_") || strings.HasPrefix(variable, "HOME=")
	}), append(s.env, "HOME="+s.dir)...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL, Credential: s.owner}
	if err := start()(cmd); err != nil {
		return nil, fmt.Errorf("%s: %w", s.name, err)
	}
	p := &process{cmd: cmd, ended: make(chan struct{})}
	go func() {
		_ = cmd.Wait()
		close(p.ended)
	}()
	return p, nil
}

// start starts commands from one thread that lives as long as the process: the kernel takes a thread's end for the
// parent's.
var start = sync.OnceValue(func() func(*exec.Cmd) error {
	type request struct {
		cmd  *exec.Cmd
		done chan error
	}
	requests := make(chan request)
	go func() {
		runtime.LockOSThread()
		for r := range requests {
			r.done <- r.cmd.Start()
		}
	}()
	return func(cmd *exec.Cmd) error {
		r := request{cmd, make(chan error)}
		requests <- r
		return <-r.done
	}
})

// binary returns the path of an executable, which may be outside of PATH.
func binary(name string, patterns ...string) (string, error) {
	if path, err := exec.LookPath(name); err == nil {
		return path, nil
	}
	for _, pattern := range patterns {
		found, _ := filepath.Glob(filepath.Join(pattern, name))
		if len(found) > 0 {
			return found[len(found)-1], nil // the newest version
		}
	}
	return "", fmt.Errorf("%s: %w", name, errMissing)
}

// freePorts returns ports that nobody listens on.
func freePorts(n int) ([]int, error) {
	ports := make([]int, n)
	for i := range ports {
		listener, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer func() { _ = listener.Close() }()
		ports[i] = listener.Addr().(*net.TCPAddr).Port
	}
	return ports, nil
}

// greets reports whether the server on the port sends something, after it was sent hello.
func greets(ctx context.Context, port int, hello string) error {
	conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", "127.0.0.1:"+strconv.Itoa(port))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(2 * time.Second))
	if _, err := conn.Write([]byte(hello)); err != nil {
		return err
	}
	_, err = conn.Read(make([]byte, 1))
	return err
}
