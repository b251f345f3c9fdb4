package testserver

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
)

const mariadbUser = `
CREATE DATABASE IF NOT EXISTS inbox;
CREATE USER IF NOT EXISTS inbox@'127.0.0.1' IDENTIFIED BY 'inbox';
GRANT ALL ON *.* TO inbox@'127.0.0.1' WITH GRANT OPTION;
`

// MariaDB starts a MariaDB server with further arguments, such as "--innodb-lock-wait-timeout=5".
func MariaDB(args ...string) (*Server, error) {
	s, install, err := newMariaDB(0, args)
	if err != nil {
		return nil, err
	}
	return s.launch(install)
}

// newMariaDB returns a server that is not started, and the command that prepares its folder.
func newMariaDB(furtherPorts int, args []string) (s *Server, install []string, err error) {
	installDB, err := binary("mariadb-install-db")
	if err != nil {
		return nil, nil, err
	}
	mariadbd, err := binary("mariadbd", "/usr/sbin")
	if err != nil {
		return nil, nil, err
	}
	s, ports, err := newServer("mariadb", 1+furtherPorts, "mysql")
	if err != nil {
		return nil, nil, err
	}
	s.DSN = fmt.Sprintf("inbox:inbox@tcp(127.0.0.1:%d)/inbox?readTimeout=60s", s.Port)
	s.furtherPorts = ports[1:]
	initFile := s.path("init.sql")
	if err := s.write(map[string]string{initFile: mariadbUser}); err != nil {
		s.Remove()
		return nil, nil, err
	}
	s.command = append([]string{
		mariadbd, "--no-defaults", "--datadir=" + s.path("data"), "--port=" + strconv.Itoa(s.Port), "--bind-address=127.0.0.1",
		"--socket=" + s.path("mariadb.sock"), "--pid-file=" + s.path("mariadb.pid"), "--skip-name-resolve",
		// A killed process loses nothing that it wrote, as long as the machine runs.
		"--max-connections=200", "--innodb-flush-log-at-trx-commit=2",
	}, args...)
	s.first = []string{"--init-file=" + initFile}
	s.ready = func(ctx context.Context) error { return greets(ctx, s.Port, "") }
	return s, []string{
		installDB, "--no-defaults", "--datadir=" + s.path("data"), "--auth-root-authentication-method=normal",
		"--skip-test-db", "--skip-name-resolve",
	}, nil
}

// Galera starts a cluster of MariaDB servers. A node that was killed joins again when it is started, as long as another
// one runs.
func Galera(nodes int, args ...string) (cluster []*Server, err error) {
	defer func() {
		if err != nil {
			for _, s := range cluster {
				s.Remove()
			}
			cluster = nil
		}
	}()
	client, err := binary("mariadb")
	if err != nil {
		return nil, err
	}
	for _, name := range []string{"rsync", "lsof"} { // a joining node gets its data through them
		if _, err := binary(name, "/usr/sbin"); err != nil {
			return nil, err
		}
	}
	provider, err := binary("libgalera_smm.so", "/usr/lib/galera", "/usr/lib/*/galera*")
	if err != nil {
		return nil, err
	}
	var installs [][]string
	var addresses []string
	for range nodes {
		s, install, err := newMariaDB(3, args)
		if err != nil {
			return cluster, err
		}
		cluster = append(cluster, s)
		installs = append(installs, install)
		addresses = append(addresses, "127.0.0.1:"+strconv.Itoa(s.furtherPorts[0]))
	}
	for i, s := range cluster {
		group, increments, snapshots := s.furtherPorts[0], s.furtherPorts[1], s.furtherPorts[2]
		s.command = append(s.command,
			"--wsrep-on=ON", "--wsrep-provider="+provider, "--wsrep-cluster-address=gcomm://"+strings.Join(addresses, ","),
			"--wsrep-provider-options="+strings.Join([]string{
				"gmcast.listen_addr=tcp://127.0.0.1:" + strconv.Itoa(group), "ist.recv_addr=127.0.0.1:" + strconv.Itoa(increments),
				"gcache.size=16M",
				// Notice sooner that a node is gone.
				"evs.keepalive_period=PT0.5S", "evs.inactive_check_period=PT0.5S", "evs.suspect_timeout=PT2S", "evs.inactive_timeout=PT5S",
			}, ";"),
			"--wsrep-node-address=127.0.0.1:"+strconv.Itoa(group), "--wsrep-node-name=node"+strconv.Itoa(i),
			"--wsrep-sst-method=rsync", "--wsrep-sst-receive-address=127.0.0.1:"+strconv.Itoa(snapshots),
			"--binlog-format=ROW", "--innodb-autoinc-lock-mode=2")
		s.ready = func(ctx context.Context) error { return s.synced(ctx, client) }
		if i == 0 {
			s.first = append(s.first, "--wsrep-new-cluster")
		} else {
			s.first = nil // the user comes with the data
		}
		if _, err := s.launch(installs[i]); err != nil {
			return cluster, fmt.Errorf("node %d: %w", i, err)
		}
	}
	return cluster, nil
}

// synced reports whether a node of a cluster takes statements.
func (s *Server) synced(ctx context.Context, client string) error {
	const statement = "SELECT variable_value FROM information_schema.global_status WHERE variable_name = 'wsrep_ready'"
	output, err := exec.CommandContext(ctx, client, "--no-defaults", "--protocol=tcp", "-h127.0.0.1", "-P"+strconv.Itoa(s.Port), //nolint:gosec // own binary
		"-uinbox", "-pinbox", "-N", "-B", "-e", statement).CombinedOutput()
	if err == nil && strings.TrimSpace(string(output)) != "ON" {
		err = errors.New("not synchronized")
	}
	if err != nil {
		return fmt.Errorf("%w: %s", err, output)
	}
	return nil
}
