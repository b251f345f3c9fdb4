// Command withservers runs a command with the databases and the broker that the tests need:
//
//	go run ./internal/cmd/withservers go test ./...
//
// A server whose variable is set (see package testenv) is used as it is. For the others it starts throwaway servers from
// installed binaries; else, where a Docker engine answers, those of compose.yml; else, as root on Debian, it installs the
// packages first. What cannot be had is named: its tests are skipped, unless INBOX_TEST_REQUIRE lists it; then the command
// does not run. The exit status is the command's.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/watermill-inbox/inbox/internal/testenv"
	"github.com/watermill-inbox/inbox/internal/testserver"
)

// service is a server that tests share.
type service struct {
	name     string
	variable string
	start    func() (*testserver.Server, error)
	compose  string // its DSN if Docker Compose runs it
	debian   string // its package
}

var services = []service{
	{
		"postgres", testenv.PostgreSQLVariable,
		func() (*testserver.Server, error) { return testserver.PostgreSQL() },
		"postgres://postgres:inbox@127.0.0.1:55432/postgres?sslmode=disable", "postgresql",
	},
	{
		"mariadb", testenv.MariaDBVariable,
		func() (*testserver.Server, error) { return testserver.MariaDB() },
		"root:inbox@tcp(127.0.0.1:53306)/inbox?readTimeout=60s", "mariadb-server",
	},
	{
		"rabbitmq", testenv.RabbitMQVariable, testserver.RabbitMQ,
		"amqp://guest:guest@127.0.0.1:55672/", "rabbitmq-server",
	},
}

// files are what tests start themselves or need to compile, and the Debian packages where they come from.
var files = map[string]string{
	"/usr/lib/postgresql/*/bin/initdb":      "postgresql",
	"/usr/sbin/mariadbd":                    "mariadb-server",
	"/usr/lib/galera/libgalera_smm.so":      "galera-4",
	"/usr/lib/rabbitmq/bin/rabbitmq-server": "rabbitmq-server",
	"/usr/sbin/pgbouncer":                   "pgbouncer",
	"/usr/bin/rsync":                        "rsync",
	"/usr/bin/lsof":                         "lsof",
	"/usr/bin/spin":                         "spin",
	"/usr/bin/gcc":                          "gcc",
	"/usr/include/stdio.h":                  "libc6-dev",
}

func main() {
	log.SetFlags(0)
	log.SetPrefix("withservers: ")
	if len(os.Args) < 2 {
		log.Fatal("usage: withservers command [argument...]")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:]))
}

func run(ctx context.Context, command []string) int {
	var s session
	defer s.stop()
	missing := slices.DeleteFunc(slices.Clone(services), func(s service) bool { return os.Getenv(s.variable) != "" })
	missing = s.startAll(missing)
	if len(missing) > 0 && dockerAnswers(ctx) {
		missing = s.composeAll(ctx, missing)
	}
	if packages := notInstalled(); len(packages) > 0 && isRootOnDebian() {
		if err := install(ctx, packages); err != nil {
			log.Print("install packages: ", err)
		}
		missing = s.startAll(missing)
	}
	required := strings.Split(os.Getenv(testenv.Require), ",")
	for _, service := range missing {
		log.Printf("no %s: install it (Debian: apt-get install %s), or start Docker, or set %s.",
			service.name, service.debian, service.variable)
		if slices.Contains(required, service.name) {
			log.Printf("%s requires %s", testenv.Require, service.name)
			return 1
		}
		log.Printf("Tests that need %s are skipped.", service.name)
	}
	return execute(ctx, command)
}

func execute(ctx context.Context, command []string) int {
	cmd := exec.CommandContext(ctx, command[0], command[1:]...) //nolint:gosec // what the user asked for
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Cancel = func() error {
		testserver.Terminate(cmd.Process.Pid)
		return nil
	}
	cmd.WaitDelay = 10 * time.Second
	err := cmd.Run()
	if failed, ok := errors.AsType[*exec.ExitError](err); ok && failed.ExitCode() > 0 {
		return failed.ExitCode()
	}
	if err != nil {
		log.Printf("%s: %s", command[0], err)
		return 1
	}
	return 0
}

// session is what has to be stopped.
type session struct {
	mu       sync.Mutex
	servers  []*testserver.Server
	composed bool
}

// startAll starts the servers at the same time, and returns those that are missing.
func (s *session) startAll(needed []service) (missing []service) {
	var wg sync.WaitGroup
	for _, service := range needed {
		wg.Go(func() {
			server, err := service.start()
			s.mu.Lock()
			defer s.mu.Unlock()
			if err != nil {
				if !testserver.IsMissing(err) {
					log.Print(err)
				}
				missing = append(missing, service)
				return
			}
			s.servers = append(s.servers, server)
			setenv(service.variable, server.DSN)
		})
	}
	wg.Wait()
	return missing
}

// composeAll starts the servers with Docker Compose, and returns those that are missing.
func (s *session) composeAll(ctx context.Context, needed []service) (missing []service) {
	s.composed = true
	args := []string{"compose", "up", "--detach", "--wait"}
	for _, service := range needed {
		args = append(args, service.name)
	}
	if err := output(exec.CommandContext(ctx, "docker", args...)); err != nil { //nolint:gosec // names of services
		log.Print(err)
		return needed
	}
	for _, service := range needed {
		setenv(service.variable, service.compose)
	}
	return nil
}

func (s *session) stop() {
	var wg sync.WaitGroup
	for _, server := range s.servers {
		wg.Go(server.Remove)
	}
	wg.Wait()
	if s.composed {
		if err := output(exec.Command("docker", "compose", "down", "--volumes")); err != nil {
			log.Print(err)
		}
	}
}

func setenv(variable, value string) {
	log.Printf("%s=%s", variable, value)
	_ = os.Setenv(variable, value)
}

func dockerAnswers(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return exec.CommandContext(ctx, "docker", "info").Run() == nil
}

func isRootOnDebian() bool {
	_, err := os.Stat("/etc/debian_version")
	return err == nil && os.Getuid() == 0
}

// notInstalled returns the packages that are missing.
func notInstalled() []string {
	packages := map[string]bool{}
	for file, name := range files {
		if found, _ := filepath.Glob(file); len(found) == 0 {
			packages[name] = true
		}
	}
	return slices.Sorted(maps.Keys(packages))
}

// install installs packages, without starting services of the system's own.
func install(ctx context.Context, packages []string) error {
	log.Print("apt-get install ", strings.Join(packages, " "))
	const policy = "/usr/sbin/policy-rc.d"
	if _, err := os.Stat(policy); errors.Is(err, os.ErrNotExist) {
		if err := os.WriteFile(policy, []byte("#!/bin/sh\nexit 101\n"), 0o755); err != nil { //nolint:gosec // has to be run
			return err
		}
		defer func() { _ = os.Remove(policy) }()
	}
	if err := output(exec.CommandContext(ctx, "apt-get", "update", "-q")); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "apt-get", append([]string{"install", "-y", "-q", "--no-install-recommends"}, packages...)...) //nolint:gosec // constants
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	return output(cmd)
}

// output runs a command, and tells what it printed if it fails.
func output(cmd *exec.Cmd) error {
	if printed, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, printed)
	}
	return nil
}
