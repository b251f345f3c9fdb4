package testserver_test

import (
	"testing"

	"github.com/watermill-inbox/inbox/internal/testenv"
	"github.com/watermill-inbox/inbox/internal/testserver"
)

func TestServersStartAndSurviveKills(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func() (*testserver.Server, error){
		"postgres": func() (*testserver.Server, error) { return testserver.PostgreSQL() },
		"mariadb":  func() (*testserver.Server, error) { return testserver.MariaDB() },
		"rabbitmq": testserver.RabbitMQ,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server, err := start()
			if testserver.IsMissing(err) {
				testenv.Missing(t, name, err.Error())
			}
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(server.Remove)
			server.Kill()
			if err := server.Start(); err != nil {
				t.Fatal(err)
			}
			server.Stop()
			if err := server.Start(); err != nil {
				t.Fatal(err)
			}
		})
	}
}
