// Package testserver starts throwaway servers for tests from the binaries that are installed: each in a folder and on
// ports of its own, as an unprivileged user if the test runs as root. They can be killed and started again. They end with
// the process that started them, even if that is killed. It works on Linux; elsewhere every server is missing.
package testserver

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	startTimeout = 90 * time.Second // until it answers
	stopTimeout  = 20 * time.Second // until it is killed
)

// Server is a throwaway server. Its methods are for one goroutine at a time.
type Server struct {
	// DSN is how clients reach it.
	DSN string

	// Port is its port on 127.0.0.1.
	Port int

	furtherPorts []int

	name    string
	dir     string
	owner   *owner
	env     []string
	command []string
	first   []string // further arguments of the first start
	helper  []string // a process that it needs beside it
	stop    syscall.Signal
	abort   syscall.Signal // ends it at once, but lets it free what the kernel keeps for it; 0: SIGKILL will do
	ready   func(ctx context.Context) error
	running []*process
}

// owner is an unprivileged user.
type owner struct{ uid, gid int }

// errMissing means that a server is not installed.
var errMissing = errors.New("not installed")

// IsMissing reports whether err says that a server is not installed.
func IsMissing(err error) bool { return errors.Is(err, errMissing) }

// newServer makes the server's folder, and gives it to the first of the users that exists.
func newServer(name string, ports int, users ...string) (*Server, []int, error) {
	dir, err := os.MkdirTemp("", "inbox-"+name+"-")
	if err != nil {
		return nil, nil, err
	}
	s := &Server{name: name, dir: dir, stop: syscall.SIGTERM}
	free, err := s.prepare(ports, append(users, "nobody"))
	if err != nil {
		s.Remove()
		return nil, nil, err
	}
	s.Port = free[0]
	return s, free, nil
}

func (s *Server) prepare(ports int, users []string) ([]int, error) {
	if os.Getuid() == 0 {
		account, err := lookup(users)
		if err != nil {
			return nil, fmt.Errorf("%s: no unprivileged user to run it as: %w", s.name, err)
		}
		if err := os.Chown(s.dir, account.uid, account.gid); err != nil {
			return nil, err
		}
		s.owner = account
	}
	return freePorts(ports)
}

func lookup(users []string) (*owner, error) {
	var faults []error
	for _, name := range users {
		account, err := user.Lookup(name)
		if err != nil {
			faults = append(faults, err)
			continue
		}
		uid, errUID := strconv.Atoi(account.Uid)
		gid, errGID := strconv.Atoi(account.Gid)
		if err := errors.Join(errUID, errGID); err != nil {
			return nil, err
		}
		return &owner{uid, gid}, nil
	}
	return nil, errors.Join(faults...)
}

// path returns a path in the server's folder.
func (s *Server) path(elem ...string) string {
	return filepath.Join(append([]string{s.dir}, elem...)...)
}

// LogPath is where the server's output goes.
func (s *Server) LogPath() string { return s.path("output.log") }

// write writes files that the server can read.
func (s *Server) write(files map[string]string) error {
	for path, content := range files {
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil { //nolint:gosec // nothing secret
			return err
		}
	}
	return nil
}

// launch prepares the server's folder and starts it.
func (s *Server) launch(prepare ...[]string) (*Server, error) {
	for _, command := range prepare {
		if err := s.run(command...); err != nil {
			s.Remove()
			return nil, err
		}
	}
	if err := s.Start(); err != nil {
		s.Remove()
		return nil, err
	}
	return s, nil
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

// Start starts the server, with its former data and port if it ran before, and waits until it answers.
func (s *Server) Start() error {
	if len(s.running) > 0 {
		return fmt.Errorf("%s runs already", s.name)
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	for _, command := range [][]string{s.helper, slices.Concat(s.command, s.first)} {
		if command == nil {
			continue
		}
		p, err := s.spawn(command)
		if err != nil {
			s.Kill()
			return err
		}
		s.running = append(s.running, p)
	}
	server := s.running[len(s.running)-1]
	for {
		err := s.ready(ctx)
		if err == nil {
			s.first = nil
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

// Kill ends the server and all of its processes at once, with SIGKILL. It can be started again.
func (s *Server) Kill() {
	for _, p := range slices.Backward(s.running) {
		p.kill()
	}
	s.running = nil
}

// Stop shuts the server down. It can be started again.
func (s *Server) Stop() { s.shutDown(s.stop) }

// Restart shuts the server down and starts it again.
func (s *Server) Restart() error {
	s.Stop()
	return s.Start()
}

// Remove ends the server and deletes its folder.
func (s *Server) Remove() {
	if s.abort != 0 {
		s.shutDown(s.abort)
	}
	s.Kill()
	_ = os.RemoveAll(s.dir)
}

func (s *Server) shutDown(signal syscall.Signal) {
	if len(s.running) == 0 {
		return
	}
	server := s.running[len(s.running)-1]
	server.signal(signal)
	select {
	case <-server.ended:
	case <-time.After(stopTimeout):
	}
	s.Kill()
}

func (s *Server) tail() string {
	output, _ := os.ReadFile(s.LogPath())
	return string(output[max(0, len(output)-4000):])
}

// process is a child, and the processes that it started.
type process struct {
	cmd   *exec.Cmd
	reins *os.File // where its supervisor takes orders
	ended chan struct{}
}

// spawn starts a command under a supervisor, as the server's owner.
func (s *Server) spawn(command []string) (*process, error) {
	log, err := os.OpenFile(s.LogPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644) //nolint:gosec // nothing secret
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }()
	orders, reins, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer func() { _ = orders.Close() }()
	cmd, err := supervised(s.dir, s.owner, command)
	if err != nil {
		_ = reins.Close()
		return nil, fmt.Errorf("%s: %w", s.name, err)
	}
	cmd.Dir = s.dir
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(variable string) bool {
		return strings.HasPrefix(variable, "PG") || strings.HasPrefix(variable, "RABBITMQ_")
	}), append(s.env, "HOME="+s.dir, "TMPDIR="+s.dir)...) // MariaDB deletes the temporary tables of others that start
	cmd.Stdin, cmd.Stdout, cmd.Stderr = orders, log, log
	if err := cmd.Start(); err != nil {
		_ = reins.Close()
		return nil, fmt.Errorf("%s: %w", s.name, err)
	}
	p := &process{cmd: cmd, reins: reins, ended: make(chan struct{})}
	go func() {
		_ = cmd.Wait()
		_ = reins.Close()
		close(p.ended)
	}()
	return p, nil
}

func (p *process) signal(signal syscall.Signal) { _, _ = p.reins.Write([]byte{byte(signal)}) }

func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.ended
}

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

// freePorts returns ports that nobody listens on. They lie below those that systems give to clients, one of which could
// otherwise take the port of a server while that is down.
func freePorts(n int) ([]int, error) {
	var ports []int
	for range 1000 {
		port := 10_000 + rand.IntN(20_000)
		listener, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:"+strconv.Itoa(port))
		if err != nil {
			continue
		}
		defer func() { _ = listener.Close() }() // after the last was chosen
		if ports = append(ports, port); len(ports) == n {
			return ports, nil
		}
	}
	return nil, errors.New("no free port")
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
