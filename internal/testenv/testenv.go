// Package testenv tells tests where the servers are that they need. `make test` starts servers and sets the variables.
package testenv

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// Require is the environment variable that lists what must not be skipped: postgres, mariadb, rabbitmq, pgbouncer, galera,
// spin.
const Require = "INBOX_TEST_REQUIRE"

// The environment variables that say where a server is.
const (
	PostgreSQLVariable = "INBOX_TEST_POSTGRES_DSN"
	MariaDBVariable    = "INBOX_TEST_MARIADB_DSN"
	RabbitMQVariable   = "INBOX_TEST_RABBITMQ_URL"
)

// PostgreSQL returns the URL of a PostgreSQL database.
func PostgreSQL(tb testing.TB) string {
	tb.Helper()
	return lookup(tb, "postgres", PostgreSQLVariable)
}

// MariaDB returns the DSN of a MariaDB or MySQL database, for github.com/go-sql-driver/mysql.
func MariaDB(tb testing.TB) string {
	tb.Helper()
	return lookup(tb, "mariadb", MariaDBVariable)
}

// RabbitMQ returns the URL of a RabbitMQ broker.
func RabbitMQ(tb testing.TB) string {
	tb.Helper()
	return lookup(tb, "rabbitmq", RabbitMQVariable)
}

func lookup(tb testing.TB, name, variable string) string {
	tb.Helper()
	dsn := os.Getenv(variable)
	if dsn == "" {
		Missing(tb, name, variable+" is not set; `make test` starts a server and sets it")
	}
	return dsn
}

// Missing skips the test because something it needs is not there, or fails it if that is required.
func Missing(tb testing.TB, name, why string) {
	tb.Helper()
	if slices.Contains(strings.Split(os.Getenv(Require), ","), name) {
		tb.Fatalf("%s is required but missing: %s", name, why)
	}
	tb.Skipf("no %s: %s", name, why)
}
