// Command withservers runs a command with the databases and the broker that the tests need:
//
//	go run ./internal/cmd/withservers go test ./...
//
// A server whose variable is set (see package testenv) is used as it is. For the others it starts throwaway servers from
// installed binaries; else, where a Docker engine answers, those of compose.yml; else, as root on Debian, it installs the
// packages first. What cannot be had is named, and its tests are skipped, or fail if INBOX_TEST_REQUIRE lists it.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/watermill-inbox/inbox/internal/testenv"
	"github.com/watermill-inbox/inbox/internal/testserver"
)

// service is what tests may need.
type service struct {
	name     string
	variable string
	start    func() (*testserver.Server, error)
	compose  string // its DSN if Docker Compose runs it
	packages []string
}

var services = []service{
	{
		"postgres", testenv.PostgreSQLVariable, func() (*testserver.Server, error) { return testserver.PostgreSQL() },
		"postgres://postgres:inbox@127.0.0.1:55432/postgres?sslmode=disable",
		[]string{"postgresql"},
	},
	{
		"mariadb", testenv.MariaDBVariable, func() (*testserver.Server, error) { return testserver.MariaDB() },
		"root:inbox@tcp(127.0.0.1:53306)/inbox?readTimeout=60s",
		[]string{"mariadb-server"},
	},
	{
		"rabbitmq", testenv.RabbitMQVariable, testserver.RabbitMQ,
		"amqp://guest:guest@127.0.0.1:55672/",
		[]string{"rabbitmq-server"},
	},
}

// tools are what tests start themselves, where it is installed: the executable and its package.
var tools = map[string]string{
	"/usr/lib/postgresql/*/bin/initdb": "postgresql", "/usr/sbin/mariadbd": "mariadb-server",
	"/usr/lib/rabbitmq/bin/rabbitmq-server": "rabbitmq-server", "/usr/sbin/pgbouncer": "pgbouncer", "/usr/bin/spin": "spin",
	"/usr/bin/rsync": "rsync", "/usr/bin/lsof": "lsof", "/usr/bin/gcc": "gcc",
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
	needed := slices.DeleteFunc(slices.Clone(services), func(s service) bool { return os.Getenv(s.variable) != "" })
	missing := startAll(needed)
	if len(missing) > 0 && dockerAnswers(ctx) {
		if err := compose(ctx, "up", "--detach", "--wait"); err != nil {
			log.Print("Docker Compose: ", err)
		} else {
			defer func() { _ = compose(context.WithoutCancel(ctx), "down", "--volumes") }()
			for _, s := range missing {
				setenv(s.variable, s.compose)
			}
			missing = nil
		}
	}
	if isRootOnDebian() && !dockerAnswers(ctx) {
		if err := install(ctx); err != nil {
			log.Print("installing packages: ", err)
		}
		missing = startAll(missing)
	}
	for _, s := range missing {
		log.Printf("no %s: tests that need it are skipped. Install it (Debian: apt-get install %s), or set %s.",
			s.name, strings.Join(s.packages, " "), s.variable)
	}
	defer stopAll()

	cmd := exec.CommandContext(ctx, command[0], command[1:]...) //nolint:gosec // what the user asked for
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	err := cmd.Run()
	var failed *exec.ExitError
	switch {
	case errors.As(err, &failed):
		return max(failed.ExitCode(), 1)
	case err != nil:
		log.Print(err)
		return 1
	}
	return 0
}

var (
	mu      sync.Mutex
	started []*testserver.Server
)

// startAll starts the servers at the same time, and returns those that are not installed.
func startAll(needed []service) (missing []service) {
	var wg sync.WaitGroup
	for _, s := range needed {
		wg.Go(func() {
			server, err := s.start()
			mu.Lock()
			defer mu.Unlock()
			switch {
			case testserver.IsMissing(err):
				missing = append(missing, s)
			case err != nil:
				log.Print(err)
			default:
				started = append(started, server)
				setenv(s.variable, server.DSN)
			}
		})
	}
	wg.Wait()
	return missing
}

func stopAll() {
	for _, server := range started {
		server.Remove()
	}
}

func setenv(variable, value string) {
	log.Printf("%s=%s", variable, value)
	_ = os.Setenv(variable, value)
}

func dockerAnswers(ctx context.Context) bool {
	return exec.CommandContext(ctx, "docker", "info").Run() == nil
}

func compose(ctx context.Context, args ...string) error {
	return output(exec.CommandContext(ctx, "docker", append([]string{"compose"}, args...)...)) //nolint:gosec // constants
}

func isRootOnDebian() bool {
	_, err := os.Stat("/etc/debian_version")
	return err == nil && os.Getuid() == 0
}

// install installs what is missing, without starting services of the system's own.
func install(ctx context.Context) error {
	var packages []string
	for executable, name := range tools {
		if found, _ := globs(executable); !found && !slices.Contains(packages, name) {
			packages = append(packages, name)
		}
	}
	if len(packages) == 0 {
		return nil
	}
	slices.Sort(packages)
	log.Print("installing ", strings.Join(packages, " "))
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
	install := exec.CommandContext(ctx, "apt-get", append([]string{"install", "-y", "-q", "--no-install-recommends"}, packages...)...) //nolint:gosec // constants
	install.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	return output(install)
}

// output runs a command, and returns what it printed if it fails.
func output(cmd *exec.Cmd) error {
	if printed, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, printed)
	}
	return nil
}

func globs(pattern string) (bool, error) {
	found, err := filepath.Glob(pattern)
	return len(found) > 0, err
}
