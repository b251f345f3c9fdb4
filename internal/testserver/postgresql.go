package testserver

import (
	"context"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const postgresBinaries = "/usr/lib/postgresql/*/bin"

// PostgreSQL starts a PostgreSQL server with further settings, such as "max_connections=50".
func PostgreSQL(settings ...string) (*Server, error) {
	initdb, err := binary("initdb", postgresBinaries)
	if err != nil {
		return nil, err
	}
	s, err := newPostgreSQL(settings)
	if err != nil {
		return nil, err
	}
	return s.launch([]string{
		initdb, "-D", s.path("data"), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync",
	})
}

func newPostgreSQL(settings []string) (*Server, error) {
	postgres, err := binary("postgres", postgresBinaries)
	if err != nil {
		return nil, err
	}
	psql, err := binary("psql", postgresBinaries)
	if err != nil {
		return nil, err
	}
	s, ports, err := newServer("postgres", 1, "postgres")
	if err != nil {
		return nil, err
	}
	s.DSN = fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", ports[0])
	s.command = []string{
		postgres, "-D", s.path("data"), "-p", strconv.Itoa(s.Port),
		"-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-c", "max_connections=200",
		// A killed process loses nothing that it wrote, as long as the machine runs.
		"-c", "fsync=off",
	}
	for _, setting := range settings {
		s.command = append(s.command, "-c", setting)
	}
	s.stop = syscall.SIGINT   // without waiting for clients
	s.abort = syscall.SIGQUIT // frees its shared memory
	s.ready = func(ctx context.Context) error {
		_, err := s.query(ctx, psql, "SELECT 1")
		return err
	}
	return s, nil
}

// query returns what a statement yields.
func (s *Server) query(ctx context.Context, psql, statement string) (string, error) {
	cmd := exec.CommandContext(ctx, psql, "-X", "-q", "-A", "-t", "-d", s.DSN, "-c", statement) //nolint:gosec // own binary
	output, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", s.name, err, output)
	}
	return strings.TrimSpace(string(output)), nil
}

// SynchronousStandby starts a standby of a PostgreSQL server, which from then on commits what the standby has, too.
func SynchronousStandby(primary *Server) (*Server, error) {
	baseBackup, err := binary("pg_basebackup", postgresBinaries)
	if err != nil {
		return nil, err
	}
	psql, err := binary("psql", postgresBinaries)
	if err != nil {
		return nil, err
	}
	s, err := newPostgreSQL(nil)
	if err != nil {
		return nil, err
	}
	if _, err := s.launch([]string{
		baseBackup, "-d", primary.DSN, "-D", s.path("data"), "-R", "-X", "stream", "-c", "fast", "--no-sync",
	}); err != nil {
		return nil, err
	}
	if err := primary.waitForStandby(psql); err != nil {
		s.Remove()
		return nil, err
	}
	return s, nil
}

func (s *Server) waitForStandby(psql string) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	for _, statement := range []string{"ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()"} {
		if _, err := s.query(ctx, psql, statement); err != nil {
			return err
		}
	}
	for {
		state, err := s.query(ctx, psql, "SELECT sync_state FROM pg_stat_replication WHERE state = 'streaming'")
		if err != nil || state == "sync" {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s has no standby: %w", s.name, ctx.Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// Promote makes a standby the primary.
func (s *Server) Promote() error {
	psql, err := binary("psql", postgresBinaries)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if promoted, err := s.query(ctx, psql, "SELECT pg_promote()"); err != nil || promoted != "t" {
		return fmt.Errorf("promote %s: %q, %w", s.name, promoted, err)
	}
	return nil
}

// FailoverDSN is the URL by which clients find whichever of the servers is the primary.
func FailoverDSN(servers ...*Server) string {
	var hosts []string
	for _, s := range servers {
		hosts = append(hosts, "127.0.0.1:"+strconv.Itoa(s.Port))
	}
	return "postgres://postgres@" + strings.Join(hosts, ",") + "/postgres?sslmode=disable&target_session_attrs=read-write"
}

// PgBouncer starts a PgBouncer in transaction mode in front of a PostgreSQL server, with poolSize connections to it, and
// with further settings, such as "max_prepared_statements=100".
func PgBouncer(postgres *Server, poolSize int, settings ...string) (*Server, error) {
	pgbouncer, err := binary("pgbouncer", "/usr/sbin")
	if err != nil {
		return nil, err
	}
	s, _, err := newServer("pgbouncer", 1, "postgres")
	if err != nil {
		return nil, err
	}
	s.DSN = strings.Replace(postgres.DSN, ":"+strconv.Itoa(postgres.Port)+"/", ":"+strconv.Itoa(s.Port)+"/", 1)
	s.ready = func(ctx context.Context) error { return greets(ctx, s.Port, "\x00\x00\x00\x08\x04\xd2\x16\x2f") } // SSLRequest
	users := s.path("users.txt")
	s.command = []string{pgbouncer, s.path("pgbouncer.ini")}
	config := fmt.Sprintf(`[databases]
* = host=127.0.0.1 port=%d

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = trust
auth_file = %s
pool_mode = transaction
default_pool_size = %d
max_client_conn = 300
ignore_startup_parameters = extra_float_digits
%s
`, postgres.Port, s.Port, users, poolSize, strings.Join(settings, "\n"))
	if err := s.write(map[string]string{users: `"postgres" ""` + "\n", s.path("pgbouncer.ini"): config}); err != nil {
		s.Remove()
		return nil, err
	}
	return s.launch()
}
