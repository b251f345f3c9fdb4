package testserver

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
)

// PostgreSQL starts a PostgreSQL server with further settings, such as "max_connections=50".
func PostgreSQL(settings ...string) (*Server, error) {
	const pattern = "/usr/lib/postgresql/*/bin"
	initdb, err := binary("initdb", pattern)
	if err != nil {
		return nil, err
	}
	postgres, err := binary("postgres", pattern)
	if err != nil {
		return nil, err
	}
	isReady, err := binary("pg_isready", pattern)
	if err != nil {
		return nil, err
	}
	s, err := newServer("postgres", "postgres")
	if err != nil {
		return nil, err
	}
	ports, err := freePorts(1)
	if err != nil {
		return nil, err
	}
	s.Port = ports[0]
	s.DSN = fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", s.Port)
	s.command = []string{
		postgres, "-D", s.path("data"), "-p", strconv.Itoa(s.Port),
		"-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=" + s.dir, "-c", "max_connections=300",
		// A killed process loses nothing that it wrote, as long as the machine runs.
		"-c", "fsync=off",
	}
	for _, setting := range settings {
		s.command = append(s.command, "-c", setting)
	}
	s.stop = stopFast
	s.ready = func(ctx context.Context) error {
		return exec.CommandContext(ctx, isReady, "-q", "-h", "127.0.0.1", "-p", strconv.Itoa(s.Port)).Run() //nolint:gosec // own binary
	}
	return s.launch(func() error {
		return s.run(initdb, "-D", s.path("data"), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
	})
}

// MariaDB starts a MariaDB server with further arguments, such as "--innodb-lock-wait-timeout=5".
func MariaDB(args ...string) (*Server, error) {
	installDB, err := binary("mariadb-install-db")
	if err != nil {
		return nil, err
	}
	mariadbd, err := binary("mariadbd", "/usr/sbin")
	if err != nil {
		return nil, err
	}
	s, err := newServer("mariadb", "mysql")
	if err != nil {
		return nil, err
	}
	ports, err := freePorts(1)
	if err != nil {
		return nil, err
	}
	s.Port = ports[0]
	s.DSN = fmt.Sprintf("inbox:inbox@tcp(127.0.0.1:%d)/inbox?readTimeout=60s", s.Port)
	initFile, err := s.write("init.sql", `
CREATE DATABASE IF NOT EXISTS inbox;
CREATE USER IF NOT EXISTS inbox@'127.0.0.1' IDENTIFIED BY 'inbox';
CREATE USER IF NOT EXISTS inbox@localhost IDENTIFIED BY 'inbox';
GRANT ALL ON *.* TO inbox@'127.0.0.1';
GRANT ALL ON *.* TO inbox@localhost;
`)
	if err != nil {
		return nil, err
	}
	s.command = append([]string{
		mariadbd, "--no-defaults", "--datadir=" + s.path("data"), "--port=" + strconv.Itoa(s.Port), "--bind-address=127.0.0.1",
		"--socket=" + s.path("mariadb.sock"), "--pid-file=" + s.path("mariadb.pid"), "--init-file=" + initFile,
		"--max-connections=300", "--innodb-flush-log-at-trx-commit=2", "--skip-name-resolve",
	}, args...)
	s.ready = func(ctx context.Context) error { return greets(ctx, s.Port, "") }
	return s.launch(func() error {
		return s.run(installDB, "--no-defaults", "--datadir="+s.path("data"), "--auth-root-authentication-method=normal",
			"--skip-test-db", "--skip-name-resolve")
	})
}

// RabbitMQ starts a RabbitMQ broker.
func RabbitMQ() (*Server, error) {
	server := "/usr/lib/rabbitmq/bin/rabbitmq-server" // what Debian puts into PATH switches users
	if _, err := os.Stat(server); err != nil {
		if server, err = binary("rabbitmq-server"); err != nil {
			return nil, err
		}
	}
	epmd, err := binary("epmd")
	if err != nil {
		return nil, err
	}
	s, err := newServer("rabbitmq", "rabbitmq")
	if err != nil {
		return nil, err
	}
	ports, err := freePorts(3)
	if err != nil {
		return nil, err
	}
	s.Port = ports[0]
	s.DSN = fmt.Sprintf("amqp://guest:guest@127.0.0.1:%d/", s.Port)
	config, err := s.write("rabbitmq.conf", "disk_free_limit.absolute = 50MB\nlog.file.level = warning\n")
	if err != nil {
		return nil, err
	}
	// The broker registers with a port mapper of its own, which would otherwise be started as a daemon and stay.
	s.helper = []string{epmd, "-address", "127.0.0.1", "-port", strconv.Itoa(ports[2])}
	s.command = []string{server}
	s.env = []string{
		"RABBITMQ_NODENAME=inbox-" + strconv.Itoa(s.Port) + "@localhost",
		"RABBITMQ_NODE_IP_ADDRESS=127.0.0.1",
		"RABBITMQ_NODE_PORT=" + strconv.Itoa(s.Port),
		"RABBITMQ_DIST_PORT=" + strconv.Itoa(ports[1]),
		"ERL_EPMD_PORT=" + strconv.Itoa(ports[2]),
		"ERL_EPMD_ADDRESS=127.0.0.1",
		"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=-kernel inet_dist_use_interface {127,0,0,1}",
		"RABBITMQ_MNESIA_BASE=" + s.path("mnesia"),
		"RABBITMQ_LOG_BASE=" + s.path("log"),
		"RABBITMQ_CONFIG_FILE=" + config,
		"RABBITMQ_CONF_ENV_FILE=" + s.path("none"),
		"RABBITMQ_ENABLED_PLUGINS_FILE=" + s.path("enabled_plugins"),
		"RABBITMQ_PID_FILE=" + s.path("rabbitmq.pid"),
		"LANG=C.UTF-8",
	}
	s.ready = func(ctx context.Context) error { return greets(ctx, s.Port, "AMQP\x00\x00\x09\x01") }
	return s.launch(nil)
}

// PgBouncer starts a PgBouncer in transaction mode in front of a PostgreSQL server, with poolSize connections to it.
func PgBouncer(postgres *Server, poolSize int) (*Server, error) {
	pgbouncer, err := binary("pgbouncer", "/usr/sbin")
	if err != nil {
		return nil, err
	}
	s, err := newServer("pgbouncer", "postgres")
	if err != nil {
		return nil, err
	}
	ports, err := freePorts(1)
	if err != nil {
		return nil, err
	}
	s.Port = ports[0]
	s.DSN = strings.Replace(postgres.DSN, ":"+strconv.Itoa(postgres.Port)+"/", ":"+strconv.Itoa(s.Port)+"/", 1)
	users, err := s.write("users.txt", `"postgres" ""`+"\n")
	if err != nil {
		return nil, err
	}
	config, err := s.write("pgbouncer.ini", fmt.Sprintf(`[databases]
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
`, postgres.Port, s.Port, users, poolSize))
	if err != nil {
		return nil, err
	}
	s.command = []string{pgbouncer, config}
	s.ready = func(ctx context.Context) error { return greets(ctx, s.Port, "\x00\x00\x00\x08\x04\xd2\x16\x2f") } // SSLRequest
	return s.launch(nil)
}

// launch prepares the server's folder and starts it.
func (s *Server) launch(prepare func() error) (*Server, error) {
	if prepare != nil {
		if err := prepare(); err != nil {
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
